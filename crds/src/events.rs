//! The events that the platform records on orders and classes.
//!
//! An event tells of something that happened once; what lasts is a condition. Every event's reason
//! is here and nowhere else.

use crate::vocabulary::documented;

documented! {
    /// Reasons of events on an order.
    OrderEvent {
        PlanChanged: "The order was planned, or planned anew; the note says what it gets and why." => "",
        DownloadStarted: "A copy began to download the model." => "",
        DownloadProgress: "The download went on; the note counts." => "",
        DownloadCompleted: "A copy holds the whole model, checked." => "",
        DownloadFailed: "A download stopped; it is tried again from where it stopped." => "Read the note: it names the file and the source's answer.",
        SettledRegionKept: "The class names another storage class than the one the order's volumes were made on. A volume does not move, so the standing one is kept; nothing stalls." => "To move the order, delete its StatefulSet and the claims behind it; the model is then downloaded again.",
        WorkloadRebuilding: "The new plan gives the copies another placement or a larger volume, so they are taken down and raised anew; the note says which." => "",
        ReplicasHeldOnPreviousRuntime: "The platform ships a newer runtime release; the copies that serve were kept on theirs." => "Edit the order to move all copies, or delete a copy to move that one.",
        ClassChangeHeld: "The class was edited in a way that would restart the copies; they were kept as they are." => "Edit the order to move it to the class's new policy.",
        ReplicasMoving: "The order was edited, and its copies are moved to the new description as the class asks." => "",
        MoveStopped: "A copy of the new description does not get ready, so no further copy is taken down." => "Read the note, then edit the order.",
        ReplicasMoved: "All copies came up on the current description." => "",
        OrderRefused: "The order cannot be served as it stands; the note says why." => "Look at the order's conditions.",
        OrderReady: "The endpoint answers for the model." => "",
    }
}

documented! {
    /// Reasons of events on a class.
    ClassEvent {
        ClassRefused: "The class cannot be used as it stands; the note says why." => "Look at the class's conditions.",
        ClassReady: "Orders can be served under the class." => "",
        ShippedClassDiffers: "The built-in class was edited and differs from the one that this version ships; the edits stay." => "To take the shipped one, delete the class: it is made anew.",
    }
}

impl OrderEvent {
    /// Whether the event is a warning.
    #[must_use]
    pub const fn is_warning(self) -> bool {
        matches!(
            self,
            Self::DownloadFailed | Self::SettledRegionKept | Self::MoveStopped | Self::OrderRefused
        )
    }
}

impl ClassEvent {
    /// Whether the event is a warning.
    #[must_use]
    pub const fn is_warning(self) -> bool {
        matches!(self, Self::ClassRefused)
    }
}
