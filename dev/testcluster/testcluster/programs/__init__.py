"""The programs of a cluster, which are built from Go modules, and archives of images that this package makes."""
