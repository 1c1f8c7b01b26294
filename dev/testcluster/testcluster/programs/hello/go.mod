// The application of a cluster's own smoke tests.
module tinsmith.dev/tests/cluster/hello

go 1.24.0
