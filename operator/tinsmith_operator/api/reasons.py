"""Every reason that a condition of a session or pool can carry.

The table of docs/reference/conditions.md is made of it.

A reason is written into the cluster, and people match on it: renaming one is a change of the API.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class Progress(Enum):
    """What kstatus, and with it every GitOps tool, reads."""

    DONE = auto()  # neither Reconciling nor Stalled
    MOVING = auto()  # Reconciling: nothing to do but wait
    STUCK = auto()  # Stalled: a person has to do something; it goes on by itself once that is done


class Reason(StrEnum):
    progress: Progress
    meaning: str
    cure: str

    def __new__(cls, value: str, progress: Progress = Progress.DONE, meaning: str = "", cure: str = "") -> Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.progress = progress
        member.meaning = meaning
        member.cure = cure
        return member

    # --- as it should be
    WORKER_READY = "WorkerReady", Progress.DONE, "The weights are loaded and the worker answers."
    REPLICAS_READY = "ReplicasReady", Progress.DONE, "Replicas of the pool sample."
    SCALED_TO_ZERO = (
        "ScaledToZero",
        Progress.DONE,
        "`spec.replicas` is 0, and no replica is left.",
        "Scale the pool up to sample from it.",
    )
    SUSPENDED = (
        "Suspended",
        Progress.DONE,
        "`spec.suspend` is set and no pod is left. The volume keeps everything.",
        "Set `spec.suspend: false` to go on.",
    )
    AS_WANTED = "AsWanted", Progress.DONE, "There is nothing left to do."
    AS_EXPECTED = "AsExpected", Progress.DONE, "Nothing is wrong that would not be said by `Ready`."
    SLOTS_FREE = "SlotsFree", Progress.DONE, "Another adapter fits."
    ALL_SLOTS_USED = (
        "AllSlotsUsed",
        Progress.DONE,
        "Every place of a model is taken, those of parked adapters included; creating another model waits.",
        "Raise `spec.adapters.slots`, which restarts the worker with more places, or add a session for the same model.",
    )
    IMAGE_CURRENT = "ImageCurrent", Progress.DONE, "It runs the image that a restart would bring."
    NEW_DEFAULT_IMAGE = (
        "NewDefaultImage",
        Progress.DONE,
        "It keeps the image that it runs, although the default image of the installation is another one now.",
        "Restart it when it suits you: `kubectl tinsmith restart`, or annotate it `tinsmith.dev/restart-requested-at`.",
    )
    NEW_SETTINGS = (
        "NewSettings",
        Progress.DONE,
        "It keeps the settings of the installation for pods, such as the checkpoint root, with which it was started, "
        "although they are others now.",
        "Restart it when it suits you: `kubectl tinsmith restart`, or annotate it `tinsmith.dev/restart-requested-at`.",
    )
    TAKING_ITS_TURN = (
        "TakingItsTurn",
        Progress.DONE,
        "Restarts that nobody asked for are on, and its turn has come: it takes the image and settings of the "
        "installation.",
    )
    NOT_REPORTED = "NotReported", Progress.DONE, "The worker has not said yet how many places are taken."

    # --- on the way
    CREATING_OBJECTS = "CreatingObjects", Progress.MOVING, "The objects that belong to it are being created."
    WAITING_FOR_SCHEDULER = "WaitingForScheduler", Progress.MOVING, "The pod is there and has no node yet."
    SCHEDULING_GATED = (
        "SchedulingGated",
        Progress.MOVING,
        "A scheduling gate keeps the pod from the scheduler. The message names it.",
        "Look at the controller that set the gate: it takes the gate away when the pod may start.",
    )
    PREEMPTED = (
        "Preempted",
        Progress.MOVING,
        "The pod had to make room for a pod of higher priority. The next one starts when there is room.",
        "Add a node that fits, or give the pod a priority: `spec.pod.priorityClassName`.",
    )
    EVICTED = (
        "Evicted",
        Progress.MOVING,
        "The node ended the pod, for want of memory or disk or because it shuts down. The next one follows by itself. "
        "The message quotes the kubelet.",
        "If it happens again, raise `spec.resources.requests`, or look at what else fills the node.",
    )
    UNSCHEDULABLE = (
        "Unschedulable",
        Progress.MOVING,
        "No node takes the pod. The message quotes the scheduler.",
        "Add a node that fits, lower `spec.resources`, or change how `spec.pod` selects nodes.",
    )
    CLAIM_UNBOUND = (
        "ClaimUnbound",
        Progress.MOVING,
        "A PersistentVolumeClaim that the pod needs has no volume.",
        "Look at the events of the claim: its storage class is unknown, its provisioner does not run, or it cannot "
        "give such a size. `spec.storage` can be corrected while there is no volume.",
    )
    PREPARING_POD = "PreparingPod", Progress.MOVING, "The node attaches volumes and pulls the image."
    LOADING_MODEL = "LoadingModel", Progress.MOVING, "The worker runs and loads the model, or replays its journal."
    RESTARTING = (
        "Restarting",
        Progress.MOVING,
        "The worker stops with a snapshot and starts again, because its pod is not what the spec asks for.",
    )
    PULLING_IMAGE = (
        "PullingImage",
        Progress.MOVING,
        "Another image is pulled onto the worker's node; the worker stops for it once it is there.",
    )
    UPGRADING = "Upgrading", Progress.MOVING, "The worker stops with a snapshot before another image gets the volume."
    REPLAYING_ON_OLD_IMAGE = (
        "ReplayingOnOldImage",
        Progress.MOVING,
        "The new image refused the volume, because the old one has not replayed its journal: it runs until it has.",
    )
    ROLLING_OUT = (
        "RollingOut",
        Progress.MOVING,
        "The pool is being brought to its number of replicas and its pod template.",
    )
    REPLICA_NODE_UNREACHABLE = (
        "ReplicaNodeUnreachable",
        Progress.MOVING,
        "The node of a replica does not answer. Kubernetes starts another replica elsewhere after a few minutes.",
    )
    SUSPENDING = "Suspending", Progress.MOVING, "`spec.suspend` is set; the worker snapshots and stops."
    WORKER_HUNG = (
        "WorkerHung",
        Progress.MOVING,
        "One operation ran longer than the hang timeout of the installation, so the worker is being replaced.",
        "If a microbatch takes as long as that, raise the hang timeout of the operator.",
    )
    WAITING_FOR_CHECKPOINTS = (
        "WaitingForCheckpoints",
        Progress.MOVING,
        "The session is being deleted with its volume; before that, every adapter is saved to the checkpoint root.",
    )
    DELETING = "Deleting", Progress.MOVING, "The session is being deleted: the worker stops, then its volume goes."

    WAITING_FOR_MEMBERS = (
        "WaitingForMembers",
        Progress.MOVING,
        "The worker of a session of several nodes waits until all of its pods run.",
        "If they do not fit together, free GPUs, or have a scheduler start pods in groups.",
    )

    QUEUED = (
        "Queued",
        Progress.MOVING,
        "A queue, such as Kueue, or whoever else wrote `spec.suspend` of the session's RayCluster or Job, keeps it "
        "suspended. The operator leaves that field to them.",
        "Look at the queue: `kubectl get workloads.kueue.x-k8s.io`.",
    )
    CONVERTING_MODEL = (
        "ConvertingModel",
        Progress.MOVING,
        "A Job brings the model into the model cache, in the form that ranks load. The worker starts when it is done.",
    )

    # --- stuck until a person does something
    KUBERAY_MISSING = (
        "KubeRayMissing",
        Progress.STUCK,
        "A session of several nodes needs KubeRay: the cluster has no RayClusters, or the operator may not list them.",
        "Install KubeRay 1.6 or newer, for example by its chart: `helm install kuberay-operator --repo "
        "https://ray-project.github.io/kuberay-helm kuberay-operator`; the session then goes on by itself.",
    )
    NAME_CONFLICT = (
        "NameConflict",
        Progress.STUCK,
        "An object of somebody else has a name that the session or pool needs. It is left alone.",
        "Delete or rename that object, or choose another name for the session or pool.",
    )
    NAME_RESERVED = (
        "NameReserved",
        Progress.STUCK,
        "The spec names a Secret, PersistentVolumeClaim or ServiceAccount of the installation itself, or an object of "
        "the session or pool would be called like one. It has no pods.",
        "Take that name out of the spec, or choose another name for the session or pool.",
    )
    IMAGE_NOT_ALLOWED = (
        "ImageNotAllowed",
        Progress.STUCK,
        "The image is none of those that the platform team lets sessions and pools run. It has no pods.",
        "Name an image that is allowed, or ask for this one to be added to `sessions.allowedImages` of the chart.",
    )
    CODE_NOT_ALLOWED = (
        "CodeNotAllowed",
        Progress.STUCK,
        "Images are limited to a list here, and a variable or server argument of the spec could have the pod run code "
        "that is not of its image. It has no pods.",
        "Take it out of the spec, or ask for its effect to be built into an image that is allowed.",
    )
    SECRET_NOT_ALLOWED = (
        "SecretNotAllowed",
        Progress.STUCK,
        "A Secret that the spec names is none of those that the platform team lets sessions and pools use. It has no "
        "pods.",
        "Name one that is allowed, or ask for this one to be added to `sessions.allowedSecrets` of the chart.",
    )
    OVERRIDES_REFUSED = (
        "OverridesRefused",
        Progress.STUCK,
        "The API server refused an object that was made from the spec. The message quotes it.",
        "Change the field under `spec.pod` or `spec.resources` that the message names.",
    )
    OBJECT_REFUSED = (
        "ObjectRefused",
        Progress.STUCK,
        "The API server refused a Secret, Service, NetworkPolicy or PodDisruptionBudget. The message quotes it.",
        "Raise the quota, or change the policy or the object, as the message says.",
    )
    CLAIM_REFUSED = (
        "ClaimRefused",
        Progress.STUCK,
        "The API server refused the journal's claim, or its growth. The message quotes it.",
        "Raise the quota or LimitRange, or let the storage class expand volumes, as the message says; or set "
        "`spec.storage.size` back to what the volume has. Until then nothing changes.",
    )
    CLAIM_MISSING = (
        "ClaimMissing",
        Progress.STUCK,
        "A PersistentVolumeClaim that the spec names is not there.",
        "Create the claim in the same namespace.",
    )
    CLAIM_IN_USE = (
        "ClaimInUse",
        Progress.STUCK,
        "An earlier session names the same PersistentVolumeClaim, or its pod still mounts it; one worker writes to a "
        "volume.",
        "Delete this session and make it with another claim; or delete the other one, with "
        "`spec.storage.retentionPolicy.whenDeleted: Retain` if the claim was made for it: then this one goes on.",
    )
    CLAIM_IS_READ = (
        "ClaimIsRead",
        Progress.STUCK,
        "The claim that the session names for its journal has the model of a session or pool that was made earlier.",
        "Make this session with a claim of its own; or delete those that read from it: then this one goes on.",
    )
    CLAIM_IS_JOURNAL = (
        "ClaimIsJournal",
        Progress.STUCK,
        "A claim that the spec names for the model, or as its cache, is the journal of another session, which alone "
        "mounts it.",
        "Put the model on a claim of its own, and make this session or pool anew with it; or delete that session: then "
        "this one goes on.",
    )
    CLAIM_MISMATCH = (
        "ClaimMismatch",
        Progress.STUCK,
        "The journal's claim is left from an earlier session of this name, and differs in what cannot be changed.",
        "Apply the session with the claim's storage class and access mode, or delete the claim and what is on it.",
    )
    CLAIM_TERMINATING = (
        "ClaimTerminating",
        Progress.STUCK,
        "The journal's claim is marked for deletion, and will vanish with its data when the worker stops.",
        "Save what is needed as checkpoints; nothing can take a deletion back.",
    )
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        Progress.STUCK,
        "A ResourceQuota of the namespace forbids the pod, or another object. The message quotes it.",
        "Raise the quota, or use less of what it counts: lower `spec.resources`, or suspend or delete another "
        "session. It is tried again within five minutes.",
    )
    RESOURCES_REFUSED = (
        "ResourcesRefused",
        Progress.STUCK,
        "A LimitRange of the namespace forbids what the pod asks for, or a ResourceQuota wants it to ask for "
        "something that it does not name. The message quotes it.",
        "Change `spec.resources` to what the message allows, or have the LimitRange or quota changed. It is tried "
        "again within five minutes.",
    )
    ADMISSION_DENIED = (
        "AdmissionDenied",
        Progress.STUCK,
        "A policy of the cluster denied the pod or another object: an admission webhook, a ValidatingAdmissionPolicy "
        "or the namespace's Pod Security level. The message quotes it.",
        "Change the spec as the message says, or ask the owner of the policy to change it. It is tried again within "
        "five minutes.",
    )
    WEBHOOK_UNREACHABLE = (
        "WebhookUnreachable",
        Progress.STUCK,
        "An admission webhook of the cluster does not answer, and the API server takes nothing without it. The message "
        "names it.",
        "Have the webhook's own pods brought back; `kubectl get validatingwebhookconfigurations,"
        "mutatingwebhookconfigurations` says where they run. It is tried again within five minutes.",
    )
    NAMESPACE_TERMINATING = (
        "NamespaceTerminating",
        Progress.STUCK,
        "The namespace is being deleted, and nothing new is taken in it.",
        "Make the session or pool in another namespace.",
    )
    NODE_REFUSES_POD = (
        "NodeRefusesPod",
        Progress.STUCK,
        "A node that the scheduler chose did not admit the pod: its devices or resources are not what it reports. The "
        "message quotes the kubelet.",
        "Look at the node's device plugin, and cordon the node while it is out of order: the next pod then goes "
        "elsewhere.",
    )
    POD_REFUSED = (
        "PodRefused",
        Progress.STUCK,
        "The API server does not let the pod be created. The message quotes it.",
        "Create what the message says is missing, or change the field under `spec.pod` that it names; the pod is tried "
        "again within five minutes.",
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        Progress.STUCK,
        "The node cannot pull the image. The message quotes the kubelet.",
        "Correct `spec.pod.image` or the trainer image of the installation, or add `spec.pod.imagePullSecrets`.",
    )
    SECRET_MISSING = (
        "SecretMissing",
        Progress.STUCK,
        "A Secret or ConfigMap, or a key of one, that the pod needs is not there.",
        "Create it in the same namespace.",
    )
    MOUNT_FAILED = (
        "MountFailed",
        Progress.STUCK,
        "The node cannot mount a volume of the pod. The message quotes the kubelet.",
        "Look at the events of the pod and at the storage driver.",
    )
    NODE_UNREACHABLE = (
        "NodeUnreachable",
        Progress.STUCK,
        "The pod's node does not answer. The pod may still run and write, so no other is started.",
        "Bring it back; or power it off, and then taint it `node.kubernetes.io/out-of-service` or delete the Node.",
    )
    VOLUME_ON_LOST_NODE = (
        "VolumeOnLostNode",
        Progress.STUCK,
        "The journal's volume can only be used on a node that is gone, or that a taint keeps from the pod.",
        "Bring the node back, or take away its taint; else delete the claim and let clients resume from their last "
        "checkpoints.",
    )
    MODEL_NOT_FOUND = (
        "ModelNotFound",
        Progress.STUCK,
        "The worker found no model where the spec says it is.",
        "Put the model there, or correct `spec.model`, which can be changed until the session was ready.",
    )
    MODEL_INVALID = (
        "ModelInvalid",
        Progress.STUCK,
        "The worker found files that it cannot load as a model.",
        "Replace them by a complete model in the format of transformers.",
    )
    MODEL_CANNOT_LOAD = (
        "ModelCannotLoad",
        Progress.STUCK,
        "The engine failed at the model while it was loaded, for example in its first forward. The message quotes it.",
        "Make a session with a model, or an engine, that go together, or mend the model; the pod's log says where it "
        "failed.",
    )
    MODEL_CHANGED = (
        "ModelChanged",
        Progress.STUCK,
        "The model's files are not those that the adapters on this volume were trained on.",
        "Put the old files back, or pin the revision; a new model needs a new session.",
    )
    NUMERICS_CHANGED = (
        "NumericsChanged",
        Progress.STUCK,
        "The worker was killed, and would replay its operations to other weights than their results came from: its "
        "device, dtype, engine, version or another flag has changed. The message names what differs.",
        "Put the spec, or the kind of node, back as it was, let the worker stop cleanly, and change it then. Where "
        "that is impossible, add the variable that the message names to `spec.pod.env`: it accepts other weights.",
    )
    CONVERSION_FAILED = (
        "ConversionFailed",
        Progress.STUCK,
        "The Job that converts the model gave up. The message says how it ended; its pods are there with their logs.",
        "Change what the message names in the spec, or mend it and ask for another try: `kubectl tinsmith restart`, or "
        "annotate the session `tinsmith.dev/restart-requested-at`.",
    )
    VOLUME_UNSUITABLE = (
        "VolumeUnsuitable",
        Progress.STUCK,
        "The journal's volume is on a network or FUSE file system, where its database cannot be kept safely.",
        "Use a storage class of block storage.",
    )
    VOLUME_FULL = (
        "VolumeFull",
        Progress.STUCK,
        "The journal's volume has no room for another operation. What was accepted goes on, and nothing is lost.",
        "Raise `spec.storage.size` where the storage class can grow, or end programs whose adapters nobody needs.",
    )
    IMAGE_REFUSED = (
        "ImageRefused",
        Progress.STUCK,
        "The new image refused the volume twice, because the old one did not stop with a snapshot. The old one runs.",
        "Raise `spec.pod.terminationGracePeriodSeconds`, then ask for the new image under another name or tag.",
    )
    TLS_INVALID = (
        "TlsInvalid",
        Progress.STUCK,
        "The worker cannot use its certificate.",
        "Delete its Secret: the operator issues a new one.",
    )
    CERTIFICATES_NOT_KEPT = (
        "CertificatesNotKept",
        Progress.STUCK,
        "The installation's certificate authority, or the API server's certificate, cannot be used or written. What "
        "was issued before works until it ends.",
        "Mend the Secret that the message names, for all sessions and pools at once.",
    )
    CANNOT_START = (
        "CannotStart",
        Progress.STUCK,
        "The worker, or the node, said why it cannot start. The message quotes it.",
        "Do what the message says.",
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        Progress.STUCK,
        "The worker needed more memory than its limit, or than its GPU has. The message says which.",
        "Raise `spec.resources.limits.memory`, or lower `spec.adapters` or the length of sequences; or give it a "
        "larger GPU.",
    )
    CRASH_LOOP = (
        "CrashLoop",
        Progress.STUCK,
        "The worker keeps ending soon after its start, and the kubelet waits longer each time. "
        "The message has its last words, where "
        "[its image is one of the platform's](../explanation/security.md#last-words).",
        "Read the log of its last run: `kubectl logs --previous`.",
    )
