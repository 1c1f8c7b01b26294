"""Every reason that a condition of a session or pool can carry.

The table in docs/reference/conditions.md is generated from this enumeration.

Users match on reasons, so renaming a reason is a change of the API.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class Progress(Enum):
    """The states that kstatus defines. GitOps tools read the states of kstatus."""

    DONE = auto()  # neither Reconciling nor Stalled is True
    MOVING = auto()  # Reconciling is True: waiting is enough
    STUCK = auto()  # Stalled is True: a person must act; the operator then continues by itself


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

    # --- nothing to do
    WORKER_READY = "WorkerReady", Progress.DONE, "The weights are loaded, and the worker serves."
    REPLICAS_READY = "ReplicasReady", Progress.DONE, "Replicas of the pool serve."
    TEMPLATE_READY = "TemplateReady", Progress.DONE, "The warm sessions that the template asks for are ready."
    ALL_SESSIONS_USED = (
        "AllSessionsUsed",
        Progress.DONE,
        "All `spec.maxSessions` exist, and most hold models.",
        "Raise `spec.maxSessions`, or wait until models end.",
    )
    SCALED_TO_ZERO = (
        "ScaledToZero",
        Progress.DONE,
        "`spec.replicas` is 0, and no replica is left.",
        "Raise `spec.replicas` to sample from the pool.",
    )
    SUSPENDED = (
        "Suspended",
        Progress.DONE,
        "`spec.suspend` is true, and no pod is left. The volume keeps everything.",
        "Set `spec.suspend: false` to resume.",
    )
    IDLE = (
        "Idle",
        Progress.DONE,
        "No client has used it for `spec.idle.suspendAfterSeconds`, and no pod is left. A session's volume keeps "
        "everything.",
        "Nothing: the next request of a client wakes it. `kubectl tinsmith wake` wakes it without a request.",
    )
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        Progress.DONE,
        "It has existed for `spec.activeDeadlineSeconds`, and no pod is left. A session's volume keeps everything.",
        "Raise or remove `spec.activeDeadlineSeconds` to continue, or delete it.",
    )
    PAUSED = (
        "Paused",
        Progress.STUCK,
        "The annotation `tinsmith.dev/paused` is `true`. The operator changes nothing, and a deletion waits.",
        "Remove the annotation.",
    )
    AS_WANTED = "AsWanted", Progress.DONE, "The objects are as the spec asks, and nothing is under way."
    AS_EXPECTED = "AsExpected", Progress.DONE, "No problem apart from what `Ready` reports."
    SLOTS_FREE = "SlotsFree", Progress.DONE, "The worker has room for another adapter."
    ALL_SLOTS_USED = (
        "AllSlotsUsed",
        Progress.DONE,
        "All places for models are taken, also by parked adapters. Creating another model waits.",
        "Raise `spec.adapters.slots`, which restarts the worker with more places, or add a session for the same model.",
    )
    IMAGE_CURRENT = "ImageCurrent", Progress.DONE, "A restart would keep the image."
    NEW_DEFAULT_IMAGE = (
        "NewDefaultImage",
        Progress.DONE,
        "It runs an older image than the installation's default.",
        "Restart it when it suits you: `kubectl tinsmith restart`, or set the annotation "
        "`tinsmith.dev/restart-requested-at`.",
    )
    NEW_SETTINGS = (
        "NewSettings",
        Progress.DONE,
        "It runs with older settings of the installation, such as the checkpoint root.",
        "Restart it when it suits you: `kubectl tinsmith restart`, or set the annotation "
        "`tinsmith.dev/restart-requested-at`.",
    )
    TAKING_ITS_TURN = (
        "TakingItsTurn",
        Progress.DONE,
        "Automatic restarts are on, and it is this session's turn.",
    )
    NOT_REPORTED = "NotReported", Progress.DONE, "The worker has not reported yet how many places are taken."

    # --- waiting is enough
    CREATING_OBJECTS = "CreatingObjects", Progress.MOVING, "The operator or a controller is creating objects."
    WAITING_FOR_SCHEDULER = "WaitingForScheduler", Progress.MOVING, "The pod waits for the scheduler to choose a node."
    SCHEDULING_GATED = (
        "SchedulingGated",
        Progress.MOVING,
        "A scheduling gate keeps the pod from the scheduler.",
        "Look at the controller that set the gate. It removes the gate when the pod may start.",
    )
    PREEMPTED = (
        "Preempted",
        Progress.MOVING,
        "A pod of higher priority took the pod's place.",
        "Add a node that fits, or give the pod a priority: `spec.pod.priorityClassName`.",
    )
    EVICTED = (
        "Evicted",
        Progress.MOVING,
        "The node ended the pod: it lacked memory or disk, or it shuts down.",
        "If it happens again, raise `spec.resources.requests`, or look for what else fills the node.",
    )
    UNSCHEDULABLE = (
        "Unschedulable",
        Progress.MOVING,
        "No node has room for the pod.",
        "Add a node that fits, lower `spec.resources`, or change how `spec.pod` selects nodes.",
    )
    CLAIM_UNBOUND = (
        "ClaimUnbound",
        Progress.MOVING,
        "A PersistentVolumeClaim of the pod has no volume.",
        "Look at the events of the claim: its storage class is unknown, its provisioner does not run, or it cannot"
        " provide this size. `spec.storage` can be changed while there is no volume.",
    )
    WARMING = "Warming", Progress.MOVING, "Warm sessions of the template are being created or started."
    REPLACING = (
        "Replacing",
        Progress.MOVING,
        "Sessions without models are replaced, because the template has changed.",
    )
    PREPARING_POD = "PreparingPod", Progress.MOVING, "The node attaches volumes and pulls the image."
    LOADING_MODEL = "LoadingModel", Progress.MOVING, "The worker runs. It loads the model or replays its journal."
    RESTARTING = (
        "Restarting",
        Progress.MOVING,
        "The worker saves a snapshot, stops and starts again, because its pod differs from the spec.",
    )
    PULLING_IMAGE = (
        "PullingImage",
        Progress.MOVING,
        "The worker's node pulls another image. The worker stops when the image is there.",
    )
    UPGRADING = (
        "Upgrading",
        Progress.MOVING,
        "The worker saves a snapshot and stops, before another image gets the volume.",
    )
    REPLAYING_ON_OLD_IMAGE = (
        "ReplayingOnOldImage",
        Progress.MOVING,
        "The new image refused the volume, because the old image has not replayed its journal. The old image runs "
        "until it has.",
    )
    ROLLING_OUT = (
        "RollingOut",
        Progress.MOVING,
        "The Deployment of the pool is changing its number of replicas or their template.",
    )
    REPLICA_NODE_UNREACHABLE = (
        "ReplicaNodeUnreachable",
        Progress.MOVING,
        "The node of a replica does not answer. Kubernetes starts another replica after a few minutes.",
    )
    SUSPENDING = (
        "Suspending",
        Progress.MOVING,
        "`spec.suspend` is true, or it is idle or past its deadline. Its pods finish their work and stop; a worker "
        "saves a snapshot first.",
    )
    WORKER_HUNG = (
        "WorkerHung",
        Progress.MOVING,
        "One operation took longer than the hang timeout. The operator replaces the worker.",
        "If microbatches take that long, raise the operator's `hang_timeout_seconds`.",
    )
    WAITING_FOR_CHECKPOINTS = (
        "WaitingForCheckpoints",
        Progress.MOVING,
        "The session is being deleted with its volume. Every adapter is saved to the checkpoint root first.",
    )
    DELETING = (
        "Deleting",
        Progress.MOVING,
        "The session is being deleted: the worker stops, then its volume is deleted.",
    )
    WAITING_FOR_MEMBERS = (
        "WaitingForMembers",
        Progress.MOVING,
        "A session of several nodes waits until all its pods run.",
        "If they do not fit together, free GPUs, or let a scheduler start pods in groups.",
    )
    QUEUED = (
        "Queued",
        Progress.MOVING,
        "A queue such as Kueue has set `spec.suspend` of the session's RayCluster or Job.",
        "Look at the queue: `kubectl get workloads.kueue.x-k8s.io`.",
    )
    CONVERTING_MODEL = (
        "ConvertingModel",
        Progress.MOVING,
        "A Job converts the model into the model cache.",
    )

    # --- a person must act
    KUBERAY_MISSING = (
        "KubeRayMissing",
        Progress.STUCK,
        "A session of several nodes needs KubeRay; the cluster has no RayClusters, or the operator may not list them.",
        "Install KubeRay 1.6 or newer, for example with its chart: `helm install kuberay-operator --repo "
        "https://ray-project.github.io/kuberay-helm kuberay-operator`. The session then starts by itself.",
    )
    TEMPLATE_NOT_FOUND = (
        "TemplateNotFound",
        Progress.STUCK,
        "`spec.templateRef` names no SessionTemplate of the namespace.",
        "Create the SessionTemplate, or another session.",
    )
    MEMBER_STALLED = (
        "MemberStalled",
        Progress.STUCK,
        "A warm session cannot start.",
        "Correct the template.",
    )
    NAME_CONFLICT = (
        "NameConflict",
        Progress.STUCK,
        "A name that it needs belongs to another object, which the operator does not touch.",
        "Delete or rename the object, or choose another name for the session or pool.",
    )
    NAME_RESERVED = (
        "NameReserved",
        Progress.STUCK,
        "The spec names a Secret, PersistentVolumeClaim or ServiceAccount of the installation, or a child "
        "would get such a name.",
        "Remove the name from the spec, or choose another name for the session or pool.",
    )
    IMAGE_NOT_ALLOWED = (
        "ImageNotAllowed",
        Progress.STUCK,
        "The platform team does not allow this image.",
        "Name an allowed image, or ask for this one to be added to `sessions.allowedImages` of the chart.",
    )
    CODE_NOT_ALLOWED = (
        "CodeNotAllowed",
        Progress.STUCK,
        "A variable or server argument of the spec could run code from outside the allowed images.",
        "Remove it from the spec, or ask for its effect to be built into an allowed image.",
    )
    SECRET_NOT_ALLOWED = (
        "SecretNotAllowed",
        Progress.STUCK,
        "The platform team does not allow a Secret that the spec names.",
        "Name an allowed Secret, or ask for this one to be added to `sessions.allowedSecrets` of the chart.",
    )
    OVERRIDES_REFUSED = (
        "OverridesRefused",
        Progress.STUCK,
        "The API server refused an object that was built from the spec.",
        "Change the field under `spec.pod` or `spec.resources` that the message names.",
    )
    OBJECT_REFUSED = (
        "ObjectRefused",
        Progress.STUCK,
        "The API server refused a Secret, Service, NetworkPolicy or PodDisruptionBudget.",
        "Raise the quota, or change the policy or the object, as the message says.",
    )
    CLAIM_REFUSED = (
        "ClaimRefused",
        Progress.STUCK,
        "The API server refused the journal's claim, or its new size.",
        "Raise the quota or LimitRange, or let the storage class expand volumes, as the message says; or set "
        "`spec.storage.size` back to the size of the volume. Nothing changes until then.",
    )
    CLAIM_MISSING = (
        "ClaimMissing",
        Progress.STUCK,
        "A PersistentVolumeClaim that the spec names does not exist.",
        "Create the claim in the same namespace.",
    )
    CLAIM_IN_USE = (
        "ClaimInUse",
        Progress.STUCK,
        "An earlier session names the same claim for its journal, or its pod still mounts it.",
        "Delete this session and create it with another claim; or delete the other session, with "
        "`spec.storage.retentionPolicy.whenDeleted: Retain` if the claim was made for it: then this session "
        "starts.",
    )
    CLAIM_IS_READ = (
        "ClaimIsRead",
        Progress.STUCK,
        "The claim for the journal holds the model of an earlier session or pool.",
        "Create this session with a claim of its own, or delete those that read from the claim: then this session "
        "starts.",
    )
    CLAIM_IS_JOURNAL = (
        "ClaimIsJournal",
        Progress.STUCK,
        "A claim for the model or its cache is the journal of another session.",
        "Put the model on another claim, and create this session or pool again with it; or delete that session: "
        "then this one starts.",
    )
    CLAIM_MISMATCH = (
        "ClaimMismatch",
        Progress.STUCK,
        "An earlier session of this name left the journal's claim, which differs from the spec in an immutable field.",
        "Apply the session with the claim's storage class and access mode, or delete the claim with its data.",
    )
    CLAIM_TERMINATING = (
        "ClaimTerminating",
        Progress.STUCK,
        "The journal's claim was deleted. It vanishes with its data when the worker stops.",
        "Save what you need as checkpoints. A deletion cannot be undone.",
    )
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        Progress.STUCK,
        "A ResourceQuota of the namespace forbids the pod or another object.",
        "Raise the quota, or use less: lower `spec.resources`, or suspend or delete another session. The operator "
        "tries again within five minutes.",
    )
    RESOURCES_REFUSED = (
        "ResourcesRefused",
        Progress.STUCK,
        "A LimitRange forbids the pod's resources, or a ResourceQuota requires a resource that the pod does not name.",
        "Change `spec.resources` to what the message allows, or have the LimitRange or quota changed. The operator"
        " tries again within five minutes.",
    )
    ADMISSION_DENIED = (
        "AdmissionDenied",
        Progress.STUCK,
        "An admission webhook, a ValidatingAdmissionPolicy or the Pod Security level denied the pod or another object.",
        "Change the spec as the message says, or ask the policy's owner to change it. The operator tries again "
        "within five minutes.",
    )
    WEBHOOK_UNREACHABLE = (
        "WebhookUnreachable",
        Progress.STUCK,
        "An admission webhook of the cluster does not answer.",
        "Repair the webhook's own pods; `kubectl get "
        "validatingwebhookconfigurations,mutatingwebhookconfigurations` shows where they run. The operator tries "
        "again within five minutes.",
    )
    NAMESPACE_TERMINATING = (
        "NamespaceTerminating",
        Progress.STUCK,
        "The namespace is being deleted and accepts no new objects.",
        "Create the session or pool in another namespace.",
    )
    NODE_REFUSES_POD = (
        "NodeRefusesPod",
        Progress.STUCK,
        "The chosen node did not admit the pod: its devices or resources are not what it reports.",
        "Look at the node's device plugin. Cordon the node until it is repaired: the next pod then goes to another"
        " node.",
    )
    POD_REFUSED = (
        "PodRefused",
        Progress.STUCK,
        "The API server refused to create the pod.",
        "Create what the message says is missing, or change the field under `spec.pod` that it names. The "
        "controller tries again within five minutes.",
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        Progress.STUCK,
        "The node cannot pull the image.",
        "Correct `spec.pod.image` or the installation's trainer image, or add `spec.pod.imagePullSecrets`.",
    )
    SECRET_MISSING = (
        "SecretMissing",
        Progress.STUCK,
        "A Secret or ConfigMap of the pod does not exist, or lacks a key.",
        "Create it in the same namespace.",
    )
    MOUNT_FAILED = (
        "MountFailed",
        Progress.STUCK,
        "The node cannot mount a volume of the pod.",
        "Look at the events of the pod and at the storage driver.",
    )
    NODE_UNREACHABLE = (
        "NodeUnreachable",
        Progress.STUCK,
        "The pod's node does not answer. The pod may still write, so the operator starts no other one.",
        "Repair the node; or power it off, and then taint it `node.kubernetes.io/out-of-service` or delete the Node.",
    )
    VOLUME_ON_LOST_NODE = (
        "VolumeOnLostNode",
        Progress.STUCK,
        "The journal's volume is only usable on a node that is gone, or whose taint the pod does not tolerate.",
        "Bring the node back or remove its taint; otherwise delete the claim, and let clients resume from their "
        "latest checkpoints.",
    )
    MODEL_NOT_FOUND = (
        "ModelNotFound",
        Progress.STUCK,
        "The worker found no model at the place that the spec names.",
        "Put the model there, or correct `spec.model`, which can be changed until the session was ready once.",
    )
    MODEL_INVALID = (
        "ModelInvalid",
        Progress.STUCK,
        "The worker found files that are not a loadable model.",
        "Replace them with a complete model in the format of transformers.",
    )
    MODEL_CANNOT_LOAD = (
        "ModelCannotLoad",
        Progress.STUCK,
        "The engine failed while it loaded the model, for example in the first forward.",
        "Use a model and an engine that support each other, or repair the model. The pod's log shows where it failed.",
    )
    MODEL_CHANGED = (
        "ModelChanged",
        Progress.STUCK,
        "The model's files differ from those that the adapters on this volume were trained on.",
        "Put the old files back, or pin the revision. A new model needs a new session.",
    )
    NUMERICS_CHANGED = (
        "NumericsChanged",
        Progress.STUCK,
        "The worker was killed, and a replay would give other weights: device, dtype, engine, version or "
        "another flag has changed.",
        "Restore the spec or the kind of node, let the worker stop cleanly, and make the change after that. If "
        "that is impossible, add the variable that the message names to `spec.pod.env`: it accepts other weights.",
    )
    CONVERSION_FAILED = (
        "ConversionFailed",
        Progress.STUCK,
        "The Job that converts the model failed too often. Its pods and logs are kept.",
        "Correct what the message names, then ask for another try: `kubectl tinsmith restart`, or set the "
        "annotation `tinsmith.dev/restart-requested-at` of the session.",
    )
    VOLUME_UNSUITABLE = (
        "VolumeUnsuitable",
        Progress.STUCK,
        "The journal's volume is a network or FUSE file system, which is not safe for its database.",
        "Use a storage class of block storage.",
    )
    VOLUME_FULL = (
        "VolumeFull",
        Progress.STUCK,
        "The journal's volume has no room for another operation. Nothing is lost.",
        "Raise `spec.storage.size` if the storage class can expand volumes, or end programs whose adapters are not"
        " needed.",
    )
    IMAGE_REFUSED = (
        "ImageRefused",
        Progress.STUCK,
        "The new image refused the volume twice, because the old image did not stop with a snapshot. The old image"
        " runs.",
        "Raise `spec.pod.terminationGracePeriodSeconds`, then name the new image by another name or tag.",
    )
    TLS_INVALID = (
        "TlsInvalid",
        Progress.STUCK,
        "The worker cannot use its certificate.",
        "Delete the certificate's Secret: the operator issues a new one.",
    )
    CERTIFICATES_NOT_KEPT = (
        "CertificatesNotKept",
        Progress.STUCK,
        "The operator cannot use or write the certificate authority or the API server's certificate. Issued "
        "certificates stay valid until they expire.",
        "Repair the Secret that the message names. That repairs all sessions and pools.",
    )
    CANNOT_START = (
        "CannotStart",
        Progress.STUCK,
        "The worker or the node reports why the worker cannot start.",
        "Do what the message says.",
    )
    OUT_OF_MEMORY = (
        "OutOfMemory",
        Progress.STUCK,
        "The worker needed more memory than its limit, or than its GPU has.",
        "Raise `spec.resources.limits.memory`; or lower `spec.adapters` or the length of sequences; or use a "
        "larger GPU.",
    )
    CRASH_LOOP = (
        "CrashLoop",
        Progress.STUCK,
        "The worker keeps ending soon after its start, and the kubelet waits longer each time.",
        "Read the log of its last run: `kubectl logs --previous`.",
    )
