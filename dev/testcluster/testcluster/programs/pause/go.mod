// The program of a pod's sandbox.
module tinsmith.dev/tests/cluster/pause

go 1.24.0
