{{/* What all pods of this chart have in common. */}}

{{/* An image by digest, else by tag: (dict "root" $ "image" .Values.operator.image). */}}
{{- define "tinsmith.image" -}}
{{- $name := printf "%s/%s" .root.Values.image.registry .image.repository }}
{{- if .image.digest }}{{ $name }}@{{ .image.digest }}
{{- else }}{{ $name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The restricted Pod Security Standard, the pod's part. The group owns the volumes' files. */}}
{{- define "tinsmith.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The restricted Pod Security Standard, the container's part, and a root that cannot be written. */}}
{{- define "tinsmith.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where pods may run and with which secrets their images are pulled:
     (dict "root" $ "component" "operator" "values" .Values.operator). */}}
{{- define "tinsmith.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName | default (include "tinsmith.priorityClass" .root) }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* How a component's replicas spread; arguments as above. */}}
{{- define "tinsmith.spreading" -}}
{{- with .values.topologySpreadConstraints }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "tinsmith.selectorLabels" $ | fromYaml)) }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) $own) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Nothing for a single replica; arguments as above, and "name". */}}
{{- define "tinsmith.podDisruptionBudget" -}}
{{- if gt (int .values.replicas) 1 }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "tinsmith.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  # One that cannot become ready must not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tinsmith.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* Rules for the names that pods must be able to look up. */}}
{{- define "tinsmith.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* The Kubernetes API has no pods to select; policies see the port of its endpoints, or of its Service. */}}
{{- define "tinsmith.kubernetesApiEgress" -}}
- ports:
    {{- range .Values.networkPolicy.kubernetesApiPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}

{{/* Pods of sessions or pools, by their name label: (dict "root" $ "names" (list "tinsmith-worker")). */}}
{{- define "tinsmith.workerEgress" -}}
- to:
    - podSelector:
        matchExpressions:
          - key: app.kubernetes.io/name
            operator: In
            values: {{- toYaml .names | nindent 14 }}
      {{- with .root.Values.scope }}
      {{- if .cluster }}
      namespaceSelector: {}
      {{- else if .namespaces }}
      namespaceSelector:
        matchExpressions:
          - key: kubernetes.io/metadata.name
            operator: In
            values: {{- toYaml .namespaces | nindent 14 }}
      {{- end }}
      {{- end }}
  ports:
    - {port: 7443, protocol: TCP}
{{- end }}
