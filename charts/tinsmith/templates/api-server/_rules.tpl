{{/* What the API server may read of the sessions and pools that it serves. */}}
{{- define "tinsmith.apiServerRules" -}}
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions, samplerpools]
  verbs: [list, watch]
# The replicas of pools, and which of them answer.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# A worker is its volume: models whose volume is gone are lost, and their owners are told.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list]
{{- end }}
