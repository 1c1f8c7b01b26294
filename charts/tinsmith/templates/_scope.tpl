{{/* The namespaces in which the release manages and serves sessions and pools. */}}

{{/* The namespaces, as JSON: {"names": [...]}. Empty for the whole cluster. */}}
{{- define "tinsmith.namespaces" -}}
{{- $names := .Values.scope.cluster | ternary list (.Values.scope.namespaces | default (list .Release.Namespace)) }}
{{- dict "names" $names | toJson }}
{{- end }}

{{/* The namespaces as a setting of operator and API server. Empty for the release's namespace, which is their default. */}}
{{- define "tinsmith.namespacesSetting" -}}
{{- .Values.scope.cluster | ternary "*" (join "," .Values.scope.namespaces) }}
{{- end }}

{{/* The namespace in which the API server creates sessions from templates: the release's namespace if it is served, else
     the first served one. */}}
{{- define "tinsmith.templateNamespace" -}}
{{- $names := (include "tinsmith.namespaces" . | fromJson).names }}
{{- if or (not $names) (has .Release.Namespace $names) }}{{ .Release.Namespace }}
{{- else }}{{ first $names }}
{{- end }}
{{- end }}

{{/* A name for cluster-wide objects. It contains the namespace, because another namespace may have a release of this name. */}}
{{- define "tinsmith.clusterName" -}}
{{ .root.Release.Namespace }}-{{ .root.Release.Name }}-{{ .component }}
{{- end }}

{{/* Roles with these rules in every namespace of the scope:
     (dict "root" $ "component" "operator" "account" NAME "rules" RULES). */}}
{{- define "tinsmith.scopedRules" -}}
{{- $names := (include "tinsmith.namespaces" .root | fromJson).names }}
{{- if not $names }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ include "tinsmith.clusterName" . }}
  labels: {{- include "tinsmith.labels" . | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
{{- end }}
{{- range $names }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $.account }}
  namespace: {{ . }}
  labels: {{- include "tinsmith.labels" $ | nindent 4 }}
rules:
  {{- $.rules | nindent 2 }}
{{- end }}
{{- end }}

{{/* The bindings of these roles to the component's account; the same arguments without "rules". */}}
{{- define "tinsmith.scopedBindings" -}}
{{- $names := (include "tinsmith.namespaces" .root | fromJson).names }}
{{- if not $names }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ include "tinsmith.clusterName" . }}
  labels: {{- include "tinsmith.labels" . | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ include "tinsmith.clusterName" . }}
subjects:
  {{- include "tinsmith.account" . | nindent 2 }}
{{- end }}
{{- range $names }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $.account }}
  namespace: {{ . }}
  labels: {{- include "tinsmith.labels" $ | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $.account }}
subjects:
  {{- include "tinsmith.account" $ | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tinsmith.account" -}}
- kind: ServiceAccount
  name: {{ .account }}
  namespace: {{ .root.Release.Namespace }}
{{- end }}
