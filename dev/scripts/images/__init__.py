"""The builds of Tinsmith's images with docker or buildah. A cluster without a registry can import the archives."""
