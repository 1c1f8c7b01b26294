{{/* What the operator may do with sessions and pools, wherever they are. */}}
{{- define "tinsmith.operatorRules" -}}
# The patch is for the finalizer of sessions whose volume goes with them; their spec is never written.
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions]
  verbs: [get, list, watch, patch]
- apiGroups: [tinsmith.dev]
  resources: [samplerpools]
  verbs: [get, list, watch]
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions/status, samplerpools/status]
  verbs: [patch]
# Where owner references are guarded, a child that blocks its owner's deletion needs this.
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions/finalizers, samplerpools/finalizers]
  verbs: [update]
# A session whose volume goes with it stops its worker first; else children go by owner references.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
# What converts a session's model is made anew or not at all, never changed.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
# Of sessions of several nodes. Nothing is asked of KubeRay's kind before there is such a session.
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, secrets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
# Volumes have no owner: those of sessions that ask for it are deleted by the operator.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# Workers that hang or are to change are deleted; StatefulSets bring them back.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
# Warnings about a worker's pod and volume say why a session is not ready; our own tell what was done.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end }}

{{/* What it may do with what belongs to the installation, in the release's namespace. */}}
{{- define "tinsmith.operatorOwnRules" -}}
# A new Lease has no name yet that a rule could hold on to.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "tinsmith.operatorLease" . }}]
  verbs: [get, update]
# The authority, the API server's certificate, and the first key.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames:
    - {{ include "tinsmith.caSecret" . }}
    - {{ include "tinsmith.apiServerTlsSecret" . }}
    {{- with include "tinsmith.madeKeySecret" . }}
    - {{ . }}
    {{- end }}
  verbs: [get, patch]
{{- end }}
