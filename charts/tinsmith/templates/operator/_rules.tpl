{{/* The rules for the operator's access to sessions and pools in every namespace of the scope. */}}
{{- define "tinsmith.operatorRules" -}}
# The operator patches only the finalizer of sessions whose volume is deleted with them, and deletes what is idle for
# longer than its spec allows. It creates warm sessions of templates, and never changes a spec.
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [tinsmith.dev]
  resources: [samplerpools]
  verbs: [get, list, watch, delete]
- apiGroups: [tinsmith.dev]
  resources: [sessiontemplates]
  verbs: [get, list, watch]
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions/status, samplerpools/status, sessiontemplates/status]
  verbs: [patch]
# The admission plugin OwnerReferencesPermissionEnforcement requires this right for blockOwnerDeletion.
- apiGroups: [tinsmith.dev]
  resources: [trainingsessions/finalizers, samplerpools/finalizers]
  verbs: [update]
# If a session's volume is deleted with it, the operator stops the worker first. Owner references delete the rest.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
# The operator creates and deletes the Job that converts a session's model, and never changes it.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
# RayClusters of sessions of several nodes. The operator uses KubeRay's API only if such a session exists.
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
# Volumes have no owner reference. The operator deletes them for sessions that request it.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
# The operator deletes pods of workers that hang or must change. The StatefulSet creates them again.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
# The operator reads warnings about a worker's pod and volume for its conditions, and writes its own Events.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end }}

{{/* The rules for the operator's access to the installation's own objects in the release's namespace. */}}
{{- define "tinsmith.operatorOwnRules" -}}
# RBAC cannot restrict `create` by name.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "tinsmith.operatorLease" . }}]
  verbs: [get, update]
# The Secrets of the certificate authority, the API server's certificate, and the first key.
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
