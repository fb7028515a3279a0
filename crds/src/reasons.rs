//! The reasons that conditions carry, with what each means and what to do about it.
//!
//! Every reason that a condition may hold is here and nowhere else; the FAQ is generated from these
//! texts. A text speaks to the person who reads the condition: an order's reasons to the
//! namespace user, so they never name other namespaces or the class's internals.

use crate::vocabulary::documented;

documented! {
    /// Reasons of an order's conditions.
    OrderReason {
        // ClassResolved.
        ClassResolved: "The class exists and admits the order's namespace." => "",
        ClassNotFound: "No InferenceServiceClass has the name that the order gives." => "Correct spec.inferenceServiceClassName, or ask the administrator which classes there are.",
        ClassNotReady: "The class exists but did not pass validation, so nothing new is raised under it. Copies that serve already keep serving." => "Ask the administrator to look at the class's conditions; the order goes on by itself when they are met.",
        NamespaceNotAllowed: "The class does not admit orders of this namespace. Copies that serve already keep serving." => "Order under another class, or ask the administrator to add the namespace to the class.",

        // ModelResolved.
        ModelResolved: "The model is known: its revision, size, architecture and contract are in status.model." => "",
        ModelResolving: "The model's source is being read." => "Wait; the message says what is read.",
        ModelSourceNotFound: "The source does not hold what the order names: no such repository, revision, bucket, claim, artifact or catalog entry." => "Correct the source in spec.model; the message names what was looked for.",
        ModelSourceUnavailable: "The source could not be reached or did not answer as it should. It is tried again with growing pauses." => "Check the network way to the source and its address; the message holds its answer.",
        ModelFileNotFound: "No file of the repository matches spec.model.huggingFace.file." => "Correct the file or the pattern; the message lists what the repository holds.",
        ModelFileAmbiguous: "The repository holds several variants of the model and the order does not say which one to serve." => "Name one in spec.model.huggingFace.file; the message lists them.",
        ModelFilesInvalid: "The model's files contradict themselves or are damaged: a header that is cut off, sizes that do not add up, a checksum that differs." => "Publish the model anew or order another revision; the message names the file.",
        ModelNotSupported: "The files are not a model that a runtime of this release serves." => "Order a model in a format and architecture that the message names.",
        AccessDenied: "The source refused access: the model is gated or private and the credentials are missing or not enough." => "Name a Secret with a token that may read the model, and accept the model's terms with that account.",
        SecretNotFound: "A Secret that the order names does not exist in its namespace or lacks the key." => "Create the Secret with the key that the message names.",
        EndpointTypeNotAllowed: "Nothing that the model can do is a contract that the class allows." => "Order another model, or under a class that allows one of the contracts in the message.",
        CatalogDisabled: "The order names the model catalog, and the platform is configured without it (catalog.mode None)." => "Order from another source, or ask the administrator to enable the catalog.",
        SourceNotSupported: "This version of the platform does not serve this kind of source yet." => "Order from a source that the message names.",

        // Planned.
        LaunchPlanCalculated: "A placement was found; status.plan says which and why." => "",
        WaitingForModel: "Nothing is planned until the model is known." => "Look at the condition ModelResolved.",
        WaitingForClass: "Nothing is planned until the class is resolved." => "Look at the condition ClassResolved.",
        PlacementUndecidable: "Placement could not be judged at all: a selection expression of the class or of a DeviceClass fails on the cluster's devices. This is about the class, not about capacity." => "Ask the administrator to look at the class's conditions: they hold the expression and the error.",
        ResourceClaimExhausted: "Every device class that the class allows was searched and none has room for a copy. This is about capacity." => "Wait until capacity is freed, order a smaller model, or ask for more; the message says what is missing.",
        NoDeviceClass: "The cluster has no DeviceClass that the class allows, or none whose devices publish their memory." => "Ask the administrator to install the driver of the accelerators or to correct the class.",
        DeviceApiUnavailable: "The cluster does not serve resource.k8s.io/v1, which accelerators are given out through." => "Ask the administrator to upgrade the cluster to Kubernetes 1.34 or later.",
        NoRecipe: "No runtime recipe of this release serves this format with this contract on the allowed accelerators." => "Order the model in another format, or under a class with another contract.",

        // RuntimeCurrent.
        RuntimeCurrent: "All copies serve by the current description, on the shipped release." => "",
        WorkloadNotCreated: "There are no copies yet." => "Look at the condition Planned.",
        ReplicasHeldOnPreviousRuntime: "The platform ships a newer runtime release than the one some copies serve on; they were kept, because a move reloads the model." => "Edit the order to move all copies, or delete a copy to move that one.",
        WorkloadRebuilding: "The new plan gives the copies another placement or a larger volume, so they cannot be kept: they are taken down with their volumes and raised anew, and the model is downloaded again." => "Wait; the order returns by itself. The message says what is still waited for.",
        ReplicasMoving: "Copies are being moved to the current description, as the class asks." => "Wait; the message counts them.",
        MoveStopped: "A copy of the new description does not get ready, or the edited order cannot be followed, so no further copy is taken down." => "Look at the copy or the condition that the message names, then edit the order.",
        ClassChangeHeld: "The class was edited in a way that would restart the copies; they were kept." => "Edit the order to move it to the class's new policy.",

        // WorkloadReady.
        WorkloadReady: "The copies that are wanted exist and answer for the model." => "",
        WorkloadCreating: "The objects of the workload are being made." => "Wait.",
        WorkloadRefused: "The API server refused an object of the workload: a quota, an admission policy or a right that is missing." => "Mend what the message names in the order's namespace.",
        NameTaken: "An object that the platform did not make has a name that the order needs." => "Rename or remove the object in the message, or rename the order.",
        VolumePending: "The volume for the model is not provisioned." => "Look at the PersistentVolumeClaim in the message; ask the administrator about the storage class.",
        ModelDownloading: "The model is being brought to the copies' volumes; status.model.download counts." => "Wait.",
        DownloadFailed: "The download stopped; it is tried again from where it stopped." => "Read the message: it names the file and the source's answer.",
        InsufficientStorage: "The volume is too small for the model." => "Ask the administrator for a larger volume; the message names both sizes.",
        ReplicasStarting: "Copies are being scheduled, started or loading the model." => "Wait; the message names what each waits for.",
        ReplicasUnschedulable: "The scheduler finds no node for a copy." => "Read the scheduler's words in the message.",
        ContainerNotStarted: "A container of a copy cannot be started: its image cannot be pulled, or it needs a Secret that is not there. The kubelet tries again." => "Read the kubelet's words in the message.",
        RuntimeCrashing: "The runtime of a copy ends by itself." => "Read the exit code and the last lines in the message.",
        ReplicasNotReady: "Copies that served do not answer." => "Read the message: it names the copy.",
        ScaleUpBlocked: "The order serves but cannot grow: the capacity that growth needs is taken." => "Wait until capacity is freed, or ask for more.",

        // Ready.
        Ready: "The endpoint answers for the model." => "",
        NotReady: "A condition that the order needs is not known yet." => "Look at the other conditions.",
        PlatformUninstalled: "The platform was uninstalled while the order stood: the order's copies and its endpoint were removed, and nobody reconciles the order." => "Delete the order; or, to have it served again, ask the administrator to install the platform.",
        Deleting: "The order is being deleted with everything that was made for it, and something holds the deletion." => "Look at the finalizers in the message: each is taken away by whoever set it.",
    }
}

documented! {
    /// Reasons of a class's conditions.
    ClassReason {
        // Validated.
        Validated: "Everything that the class says can be judged." => "",
        SelectorInvalid: "A selection expression of the class is not valid CEL or does not yield true or false." => "Correct spec.acceleratorPolicy.selectors; the message holds the expression and the error.",

        // Ready.
        Ready: "Orders can be served under the class." => "",
        SelectorUndecidable: "An order found no placement, because a selection expression of the class or of a DeviceClass fails on the cluster's devices." => "Correct the expression: the message holds it with its error. Where an attribute may be absent, ask for it first: `\"colour\" in device.attributes[\"example.com\"]`.",
        NotValidated: "The class did not pass validation." => "Look at the condition Validated.",
        DeviceApiUnavailable: "The cluster does not serve resource.k8s.io/v1, which accelerators are given out through." => "Upgrade the cluster to Kubernetes 1.34 or later.",
        NoDeviceClass: "The cluster has no DeviceClass that the class allows." => "Install the driver of the accelerators, or correct spec.acceleratorPolicy.deviceClassNames.",
        DeviceClassNotFound: "A DeviceClass that the class names does not exist." => "Correct spec.acceleratorPolicy.deviceClassNames, or create the DeviceClass.",
        StorageClassNotFound: "The StorageClass that the class names does not exist." => "Correct spec.modelStorageClassName, or create the StorageClass.",
    }
}

impl OrderReason {
    /// The order's reason with this word, if there is one: reasons read back from status.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        use crate::vocabulary::Documented;
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.as_str() == word)
    }
}
