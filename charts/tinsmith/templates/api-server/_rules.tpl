{{/* The rules for the API server's access to the sessions and pools that it serves. */}}
{{- define "tinsmith.apiServerRules" -}}
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions, samplerpools]
  verbs: [list, watch]
# The API server asks the operator to wake what is suspended while idle. It may write the status only, so that it can
# change neither a spec nor a pod.
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions/status, samplerpools/status]
  verbs: [patch]
# The replicas of pools and their readiness.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# The state of a worker is on its volume. A model whose volume is gone is lost, and its clients get an error that says so.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list]
{{- end }}
