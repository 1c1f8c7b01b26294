"""The programs that a cluster runs, built from Go modules, and archives of images made by this package."""
