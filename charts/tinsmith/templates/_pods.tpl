{{/* The common parts of all pods of this chart. */}}

{{/* The reference of an image, by its digest or else by its tag: (dict "root" $ "image" .Values.operator.image). */}}
{{- define "tinsmith.image" -}}
{{- $name := printf "%s/%s" .root.Values.image.registry .image.repository }}
{{- if .image.digest }}{{ $name }}@{{ .image.digest }}
{{- else }}{{ $name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* The pod's part of the restricted Pod Security Standard. The group owns the volumes' files. */}}
{{- define "tinsmith.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The container's part of the restricted Pod Security Standard, with a read-only root file system. */}}
{{- define "tinsmith.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The scheduling fields and pull Secrets of a component's pods:
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

{{/* The topology spread of a component's replicas; the same arguments. */}}
{{- define "tinsmith.spreading" -}}
{{- with .values.topologySpreadConstraints }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "tinsmith.selectorLabels" $ | fromYaml)) }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) $own) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The PodDisruptionBudget of a component with several replicas; the same arguments and "name". */}}
{{- define "tinsmith.podDisruptionBudget" -}}
{{- if gt (int .values.replicas) 1 }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "tinsmith.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  # A pod that cannot become ready must not block a node drain.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tinsmith.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* The egress rules of DNS. */}}
{{- define "tinsmith.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* The egress rules of the Kubernetes API, which has no pods to select. The network plugin decides whether policies see the
     port of its endpoints or of its Service. */}}
{{- define "tinsmith.kubernetesApiEgress" -}}
- ports:
    {{- range .Values.networkPolicy.kubernetesApiPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end }}

{{/* The egress rule to the pods of sessions or pools, by their name label: (dict "root" $ "names" (list "tinsmith-worker")). */}}
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
