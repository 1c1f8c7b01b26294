"""The last CNI plugin of a pod.

The plugin reports the address of the pod, and waits until the pod's policies are in force.

So a pod starts only after it is isolated and after the rules for other pods include the new pod's address. The plugin
uses only the standard library, because containerd starts it for every pod.
"""

import json
import os
import socket
import sys

_SECONDS = 60.0
_TRY_AGAIN = 11


def main() -> int:
    command, settings = os.environ["CNI_COMMAND"], json.load(sys.stdin)
    try:
        if command == "ADD":
            _ask(settings["socket"], _pod(settings["prevResult"]))
        elif command == "DEL":
            _forget(settings["socket"])
        elif command == "VERSION":
            print(json.dumps({"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0"]}))
    except (OSError, KeyError, ValueError) as error:
        message = f"policies for the pod: {type(error).__name__}: {error}"
        print(json.dumps({"cniVersion": settings["cniVersion"], "code": _TRY_AGAIN, "msg": message}))
        return 1
    if command == "ADD":
        print(json.dumps(settings["prevResult"]))
    return 0


def _pod(result: dict) -> dict:  # type: ignore[type-arg]
    named = dict(word.split("=", 1) for word in os.environ["CNI_ARGS"].split(";"))
    [address] = [entry["address"].split("/")[0] for entry in result["ips"] if ":" not in entry["address"]]
    return {"container": os.environ["CNI_CONTAINERID"], "uid": named["K8S_POD_UID"], "address": address}


def _forget(path: str) -> None:
    """Report the end of the container.

    During the removal of a cluster, the enforcer may no longer listen.
    """
    try:
        _ask(path, {"container": os.environ["CNI_CONTAINERID"]})
    except (ConnectionRefusedError, FileNotFoundError):
        return


def _ask(path: str, question: dict) -> None:  # type: ignore[type-arg]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(path)
        connection.sendall(json.dumps(question).encode() + b"\n")
        answer = connection.makefile().readline()
    if answer != "in force\n":
        raise ValueError(answer.strip() or "the enforcer gave no answer")


if __name__ == "__main__":
    sys.exit(main())
