//! The FAQ by reason: an entry for every word that a person can meet in status or in an event.
//!
//! In: the documented words. Out: `docs/faq.md`, which a test compares. Nothing is said here that a
//! word does not say itself.

use std::fmt::Write;

use crate::{
    ClassCondition, ClassEvent, ClassReason, Documented, OrderCondition, OrderEvent, OrderReason,
};

const HEAD: &str = "\
<!-- Generated from the Rust types of the crate inference-api; do not edit. Regenerate: hack/regenerate -->
# FAQ by reason

Find the word that you see. The column REASON of `kubectl get infsvc` has the reason of the condition that decides; `kubectl describe` shows all conditions of an order or a class, each with its message, and the events.

Every word that this version can write has an entry here, and no other has one: a test compares this page with the code.

";

/// The whole page.
pub(crate) fn page() -> String {
    let mut page = HEAD.to_owned();
    page.push_str(
        "- [Reasons on an order](#reasons-on-an-order), [events on an order](#events-on-an-order), [conditions of an order](#conditions-of-an-order)\n\
         - [Reasons on a class](#reasons-on-a-class), [events on a class](#events-on-a-class), [conditions of a class](#conditions-of-a-class)\n",
    );
    entries::<OrderReason>(&mut page, "Reasons on an order");
    entries::<OrderEvent>(&mut page, "Events on an order");
    entries::<OrderCondition>(&mut page, "Conditions of an order");
    entries::<ClassReason>(&mut page, "Reasons on a class");
    entries::<ClassEvent>(&mut page, "Events on a class");
    entries::<ClassCondition>(&mut page, "Conditions of a class");
    page
}

fn entries<W: Documented>(page: &mut String, head: &str) {
    let _ = write!(page, "\n## {head}\n");
    for word in W::ALL {
        let remedy = match word.remedy() {
            "" => "Nothing: it is as it should be.",
            remedy => remedy,
        };
        let _ = write!(
            page,
            "\n### {}\n\n{}\n\n**What to do.** {remedy}\n",
            word.as_str(),
            word.meaning()
        );
    }
}
