{{/* The rules for the API server's access to the sessions and pools that it serves. */}}
{{- define "tinsmith.apiServerRules" -}}
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions, samplerpools]
  verbs: [list, watch]
# The replicas of pools and their readiness.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# The state of a worker is on its volume. A model whose volume is gone is lost, and its clients get an error that says so.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list]
{{- end }}
