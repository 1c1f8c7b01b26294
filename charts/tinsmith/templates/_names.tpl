{{/* Names and labels. A name is the release's and what the thing is: the same release finds its things again. */}}

{{- define "tinsmith.operator" -}}{{ .Release.Name }}-operator{{- end }}
{{/* The same for every release of a namespace: two operators that act on the same sessions would never come to rest. */}}
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
{{/* The Secret of a key that is given has a name of its own: Helm would not take over the one that the operator made. */}}
{{- define "tinsmith.keySecret" -}}
{{- if .Values.keys.value }}{{ .Release.Name }}-given-key
{{- else }}{{ .Values.keys.existingSecret.name | default (include "tinsmith.madeKeySecret" .) }}
{{- end }}
{{- end }}
{{/* The Secret of the first key, where the operator makes it. Empty where a key is given. */}}
{{- define "tinsmith.madeKeySecret" -}}
{{- if not (or .Values.keys.value .Values.keys.existingSecret.name) }}{{ .Release.Name }}-api-key{{ end }}
{{- end }}
{{- define "tinsmith.keySecretKey" -}}
{{ ternary .Values.keys.existingSecret.key "key" (ne .Values.keys.existingSecret.name "") }}
{{- end }}

{{/* The PriorityClass of operator and API server. Empty where the chart makes none. Its value cannot be changed, so another
     value is another class. A namespace may be called system-…, a PriorityClass may not. */}}
{{- define "tinsmith.priorityClass" -}}
{{- if .Values.priorityClass.create -}}
tinsmith-{{ include "tinsmith.clusterName" (dict "root" . "component" (int .Values.priorityClass.value | toString)) }}
{{- end }}
{{- end }}

{{/* What selects a component's pods: (dict "root" $ "component" "operator"). */}}
{{- define "tinsmith.selectorLabels" -}}
app.kubernetes.io/name: tinsmith
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The labels of every object: as above. */}}
{{- define "tinsmith.labels" -}}
{{ include "tinsmith.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The labels of a component's pods: as above, with "values" of the component. Ours win: the selectors need them. */}}
{{- define "tinsmith.podLabels" -}}
{{ toYaml (merge (include "tinsmith.selectorLabels" . | fromYaml) .values.podLabels) }}
{{- end }}

{{/* How clients reach the API server: the public URL, else the ingress's host. Empty when neither is known. */}}
{{- define "tinsmith.publicUrl" -}}
{{- with .Values.apiServer }}
{{- if .publicUrl }}{{ .publicUrl }}
{{- else if and .ingress.enabled .ingress.host }}{{ ternary "https" "http" .ingress.tls.enabled }}://{{ .ingress.host }}
{{- end }}
{{- end }}
{{- end }}

{{/* The same for a person to read: with what there is to be filled in. */}}
{{- define "tinsmith.shownUrl" -}}
{{- with .Values.apiServer }}
{{- if include "tinsmith.publicUrl" $ }}{{ include "tinsmith.publicUrl" $ }}
{{- else if .ingress.enabled }}http://ADDRESS
{{- else if .httpRoute.enabled }}http://{{ first .httpRoute.hostnames | default "ADDRESS" }}
{{- else }}http://127.0.0.1:8000
{{- end }}
{{- end }}
{{- end }}
