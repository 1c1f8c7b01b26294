# One image for all pods that kind and kubeadm start in kube-system. Each pod names its program, except CoreDNS's pod.

FROM docker.io/library/debian:trixie-slim
RUN --mount=type=secret,id=build-environment --mount=type=secret,id=ca-certificates \
    if [ -e /run/secrets/build-environment ]; then . /run/secrets/build-environment; fi \
    && apt-get update \
    && apt-get install --yes --no-install-recommends conntrack iptables kmod \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*
COPY pods/ /usr/local/bin/
ENTRYPOINT ["coredns"]
