{{/* The checkpoint root as a setting of operator and API server. */}}

{{- define "tinsmith.checkpointRoot" -}}
{{ .Values.checkpoints.remote.url | default "file:///var/lib/tinsmith/checkpoints" }}
{{- end }}

{{/* The port of the object store: the port of the endpoint in its variables, else 443. */}}
{{- define "tinsmith.checkpointPort" -}}
{{- $variables := .Values.checkpoints.remote.environment }}
{{- include "tinsmith.portOf" ($variables.AWS_ENDPOINT_URL_S3 | default $variables.AWS_ENDPOINT_URL | default "https://") }}
{{- end }}

{{/* The port of a URL. */}}
{{- define "tinsmith.portOf" -}}
{{- $url := urlParse . }}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "http" | ternary "80" "443") }}
{{- end }}
