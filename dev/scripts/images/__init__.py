"""Builds Tinsmith's images with docker or buildah, into archives that a cluster without a registry can import."""
