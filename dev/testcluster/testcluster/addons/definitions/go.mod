// Kinds of others that the chart makes objects of. Their definitions are read; nothing of this is built.
module tinsmith.dev/tests/definitions

go 1.25.0

require (
	github.com/prometheus-operator/prometheus-operator v0.85.0
	sigs.k8s.io/gateway-api v1.4.0
)
