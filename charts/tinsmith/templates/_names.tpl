{{/* Names and labels. A name consists of release and component, so that an upgrade finds the objects of its release. */}}

{{- define "tinsmith.operator" -}}{{ .Release.Name }}-operator{{- end }}
{{/* The Lease has the same name for all releases of a namespace: two operators on the same sessions would never settle. */}}
{{- define "tinsmith.operatorLease" -}}tinsmith-operator{{- end }}
{{- define "tinsmith.apiServer" -}}{{ .Release.Name }}-api-server{{- end }}
{{- define "tinsmith.apiServerTlsSecret" -}}{{ .Release.Name }}-api-server-tls{{- end }}
{{- define "tinsmith.caSecret" -}}{{ .Release.Name }}-ca{{- end }}
{{- define "tinsmith.dataClaim" -}}
{{ .Values.apiServer.storage.existingClaim | default (printf "%s-api-server-data" .Release.Name) }}
{{- end }}
{{- define "tinsmith.checkpointClaim" -}}
{{ .Values.checkpoints.storage.existingClaim | default (printf "%s-checkpoints" .Release.Name) }}
{{- end }}
{{/* The Secret of a configured key has a separate name, because Helm does not take over a Secret of the operator. */}}
{{- define "tinsmith.keySecret" -}}
{{- if .Values.keys.value }}{{ .Release.Name }}-given-key
{{- else }}{{ .Values.keys.existingSecret.name | default (include "tinsmith.madeKeySecret" .) }}
{{- end }}
{{- end }}
{{/* The Secret in which the operator creates the first key. Empty if the values set a key. */}}
{{- define "tinsmith.madeKeySecret" -}}
{{- if not (or .Values.keys.value .Values.keys.existingSecret.name) }}{{ .Release.Name }}-api-key{{ end }}
{{- end }}
{{- define "tinsmith.keySecretKey" -}}
{{ ternary .Values.keys.existingSecret.key "key" (ne .Values.keys.existingSecret.name "") }}
{{- end }}

{{/* The PriorityClass of operator and API server. Empty if the chart creates none. Kubernetes does not allow a change of its
     value, so the name contains the value. A namespace may be called system-…, a PriorityClass may not. */}}
{{- define "tinsmith.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
tinsmith-{{ include "tinsmith.clusterName" (dict "root" . "component" (int .Values.priorityClass.value | toString)) }}
{{- end }}
{{- end }}

{{/* The selector labels of a component's pods: (dict "root" $ "component" "operator"). */}}
{{- define "tinsmith.selectorLabels" -}}
app.kubernetes.io/name: tinsmith
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of every object; the same arguments. */}}
{{- define "tinsmith.labels" -}}
{{ include "tinsmith.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The labels of a component's pods; the same arguments and the component's "values". The chart's labels override
     podLabels, because the selectors need them. */}}
{{- define "tinsmith.podLabels" -}}
{{ toYaml (merge (include "tinsmith.selectorLabels" . | fromYaml) .values.podLabels) }}
{{- end }}

{{/* The URL of the API server for clients: the public URL, else the ingress's host. Empty if neither is known. */}}
{{- define "tinsmith.publicUrl" -}}
{{- with .Values.apiServer }}
{{- if .publicUrl }}{{ .publicUrl }}
{{- else if and .ingress.enabled .ingress.host }}{{ ternary "https" "http" .ingress.tls.enabled }}://{{ .ingress.host }}
{{- end }}
{{- end }}
{{- end }}

{{/* The same URL for the notes, with placeholders for unknown parts. */}}
{{- define "tinsmith.shownUrl" -}}
{{- with .Values.apiServer }}
{{- if include "tinsmith.publicUrl" $ }}{{ include "tinsmith.publicUrl" $ }}
{{- else if .ingress.enabled }}http://ADDRESS
{{- else if .httpRoute.enabled }}http://{{ first .httpRoute.hostnames | default "ADDRESS" }}
{{- else }}http://127.0.0.1:8000
{{- end }}
{{- end }}
{{- end }}
