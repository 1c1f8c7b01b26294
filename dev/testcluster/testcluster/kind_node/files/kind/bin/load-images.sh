#!/bin/sh
# Loads the images of /kind/images into containerd, and tags one of them with every image name that kubeadm uses.
set -eu

PODS=tinsmith.local/tinsmith/kind-pods:1

for archive in /kind/images/*.tar; do
    ctr --namespace=k8s.io images import "$archive"
done
while read -r name; do
    ctr --namespace=k8s.io images tag --force "$PODS" "$name"
done </kind/images/names
touch /var/lib/containerd/images-loaded
