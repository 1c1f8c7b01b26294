{{/* Checks that a schema cannot express with a helpful message. A template that is always rendered includes them. */}}
{{- define "tinsmith.checks" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]{0,39}$" .Release.Name) }}
{{- fail (printf "the release name %q is not valid: use at most 40 lower-case letters, digits and dashes, with a letter first, so that %s-api-server is the name of a Service" .Release.Name .Release.Name) }}
{{- end }}
{{- include "tinsmith.checkRegistry" . }}
{{- include "tinsmith.checkDefinitions" . }}
{{- include "tinsmith.checkKeys" . }}
{{- include "tinsmith.checkStore" . }}
{{- include "tinsmith.checkCheckpoints" . }}
{{- include "tinsmith.checkScope" . }}
{{- include "tinsmith.checkEntrance" . }}
{{- include "tinsmith.checkMonitoring" . }}
{{- include "tinsmith.checkLease" . }}
{{- include "tinsmith.checkAutoscaling" . }}
{{- include "tinsmith.checkRestarts" . }}
{{- end }}

{{- define "tinsmith.checkRegistry" -}}
{{- if not .Values.image.registry }}
{{- fail "image.registry is empty, and Tinsmith's images are not published: build them with `make images`, push them to a registry that the nodes can pull from, and pass --set image.registry=REGISTRY; or load them into the nodes and pass --set image.registry=tinsmith.local" }}
{{- end }}
{{- end }}

{{/* Without this check, Helm names the annotations that differ, but no remedy. In `helm template`, `lookup` returns nothing. */}}
{{- define "tinsmith.checkDefinitions" -}}
{{- if and .Values.crds.install .Release.IsInstall (not .Values.crds.takeOwnership) }}
{{- with lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "trainingsessions.tinsmith.dev" }}
{{- $annotations := .metadata.annotations | default dict }}
{{- $release := get $annotations "meta.helm.sh/release-name" }}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" }}
{{- if not (and (eq $release $.Release.Name) (eq $namespace $.Release.Namespace)) }}
{{- $owner := $release | empty | ternary "no Helm release" (printf "the release %s of the namespace %s" $release $namespace) }}
{{- fail (printf "the CRDs of Tinsmith exist in the cluster already, installed by %s: pass --set crds.install=false to use them as they are, or --take-ownership --set crds.takeOwnership=true to let this release manage them" $owner) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkRestarts" -}}
{{- $clocks := regexFindAll "[0-9]{2}:[0-9]{2}" .Values.operator.restarts.window -1 }}
{{- if and $clocks (eq (first $clocks) (last $clocks)) }}
{{- fail (printf "operator.restarts.window is %q, which closes when it opens: leave it empty for any time" .Values.operator.restarts.window) }}
{{- end }}
{{- end }}

{{/* The operator has the same check at its start. */}}
{{- define "tinsmith.checkLease" -}}
{{- with .Values.operator.lease }}
{{- if gt (mulf 3 .renewSeconds) (float64 .durationSeconds) }}
{{- fail (printf "operator.lease.renewSeconds is %v, and durationSeconds %v: set renewSeconds to at most a third of it, since a leader stops acting two thirds of the lease after its last renewal" .renewSeconds .durationSeconds) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkAutoscaling" -}}
{{- with .Values.apiServer.autoscaling }}
{{- if and .tlsSecretName (not .enabled) }}
{{- fail "apiServer.autoscaling.tlsSecretName has no effect without apiServer.autoscaling.enabled: enable it, or leave the name empty" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkMonitoring" -}}
{{- with .Values.monitoring }}
{{- if and .prometheusRule.enabled (not .serviceMonitor.enabled) }}
{{- fail "monitoring.prometheusRule is enabled without monitoring.serviceMonitor: alerts about missing servers would fire all the time, since Prometheus scrapes none; enable both" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkKeys" -}}
{{- if and .Values.keys.value .Values.keys.existingSecret.name }}
{{- fail "keys.value and keys.existingSecret.name are both set: set the API key, or the Secret that holds it" }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkStore" -}}
{{- with .Values.apiServer }}
{{- if and (gt (int .replicas) 1) (not .database.existingSecret.name) }}
{{- fail (printf "apiServer.replicas is %v, but the store is a SQLite file, which only one server can use: put the URL of a PostgreSQL into a Secret and set apiServer.database.existingSecret.name to it, or keep one replica" .replicas) }}
{{- end }}
{{- if and .database.existingSecret.name .storage.existingClaim }}
{{- fail "apiServer.database.existingSecret.name and apiServer.storage.existingClaim are both set: choose a database, or a SQLite file on that claim" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkCheckpoints" -}}
{{- with .Values.checkpoints }}
{{- if and .remote.url .storage.existingClaim }}
{{- fail "checkpoints.remote.url and checkpoints.storage.existingClaim are both set: choose an object store, or that claim" }}
{{- end }}
{{- if and (or .remote.environment .remote.secretName) (not .remote.url) }}
{{- fail "checkpoints.remote has an environment or a secretName, but no url: set url to the checkpoint root, such as s3://bucket/prefix" }}
{{- end }}
{{- range $name, $value := .remote.environment }}
{{- include "tinsmith.checkVariable" (dict "name" $name "value" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The operator has the same check at its start. */}}
{{- define "tinsmith.checkVariable" -}}
{{- if has .name (list "HOME" "HF_HOME" "HF_TOKEN" "OMP_NUM_THREADS") }}
{{- fail (printf "checkpoints.remote.environment has %s, which the operator sets for workers: remove it" .name) }}
{{- end }}
{{- $url := `^https?://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?(/\S*)?$` }}
{{- if and (has .name (list "AWS_ENDPOINT_URL_S3" "AWS_ENDPOINT_URL")) (not (regexMatch $url .value)) }}
{{- fail (printf "checkpoints.remote.environment.%s is %q, which is not the URL of an object store: use one such as https://store.example.com:9000" .name .value) }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkScope" -}}
{{- $others := without .Values.scope.namespaces .Release.Namespace }}
{{- if and .Values.scope.cluster .Values.scope.namespaces }}
{{- fail "scope.cluster and scope.namespaces are both set: name the namespaces, or choose the whole cluster" }}
{{- end }}
{{- if and (or .Values.scope.cluster $others) (not .Values.checkpoints.remote.url) (not .Values.checkpoints.storage.existingClaim) }}
{{- fail "scope includes namespaces other than the release's, whose pods cannot mount the checkpoint volume of the chart: set checkpoints.remote.url, or set checkpoints.storage.existingClaim to a claim that each of these namespaces has for the same files" }}
{{- end }}
{{- end }}

{{- define "tinsmith.checkEntrance" -}}
{{- with .Values.apiServer }}
{{- if and .ingress.enabled .httpRoute.enabled }}
{{- fail "apiServer.ingress and apiServer.httpRoute are both enabled: choose the one for which your cluster has a controller" }}
{{- end }}
{{- if and .ingress.tls.enabled (not .ingress.host) }}
{{- fail "apiServer.ingress.tls is enabled without a host: set apiServer.ingress.host, since a certificate needs a name" }}
{{- end }}
{{- if and .httpRoute.enabled (not .httpRoute.parentRefs) }}
{{- fail "apiServer.httpRoute is enabled without parentRefs: name the Gateway of the route" }}
{{- end }}
{{- $needed := add 10 (.settings.pollHoldSeconds | default 25 | ceil) }}
{{- range $name, $seconds := .httpRoute.timeouts }}
{{- if and $seconds (lt (int $seconds) (int $needed)) }}
{{- fail (printf "apiServer.httpRoute.timeouts.%s is %v, but polls are held for up to apiServer.settings.pollHoldSeconds: set it to at least %d, or to 0 for the Gateway's default" $name $seconds $needed) }}
{{- end }}
{{- end }}
{{- with .httpRoute.timeouts }}
{{- if and .requestSeconds (gt (int .backendRequestSeconds) (int .requestSeconds)) }}
{{- fail (printf "apiServer.httpRoute.timeouts.backendRequestSeconds is %v, and requestSeconds %v: set requestSeconds to at least as much, since the API server's part cannot take longer than the whole" .backendRequestSeconds .requestSeconds) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
