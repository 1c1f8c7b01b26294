{{/* The place of checkpoints, as operator and API server get it. */}}

{{- define "tinsmith.checkpointRoot" -}}
{{ .Values.checkpoints.remote.url | default "file:///var/lib/tinsmith/checkpoints" }}
{{- end }}

{{/* The port of the object store: that of the endpoint that its variables name, else that of https. */}}
{{- define "tinsmith.checkpointPort" -}}
{{- $variables := .Values.checkpoints.remote.environment }}
{{- $endpoint := $variables.AWS_ENDPOINT_URL_S3 | default $variables.AWS_ENDPOINT_URL | default "https://" | urlParse }}
{{- regexFind ":[0-9]+$" $endpoint.host | trimPrefix ":" | default (eq $endpoint.scheme "http" | ternary "80" "443") }}
{{- end }}
