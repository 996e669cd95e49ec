//! Events: how objects are told what their status has no room for.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use xxhash_rust::xxh3::xxh3_64;

use super::conditions::Note;

/// Who tells.
pub const CONTROLLER: &str = "pilotfish.dev/picker";
/// Longest note, in bytes (`k8s.io/kubernetes/pkg/apis/core/validation/events.go`).
pub const LONGEST: usize = 1024;
/// How much of an object's name the name of its event holds: 253 bytes are the most, a dot and 16 digits follow.
const LONGEST_PREFIX: usize = 230;

/// The event that tells `note` of an object. Its name follows from what it says: told twice, or by two replicas, it is one.
pub fn event(of: &ObjectReference, note: &Note, instance: &str) -> Event {
    let word = |word: &Option<String>| word.clone().unwrap_or_default();
    let said = format!("{}\0{}\0{}\0{}", word(&of.kind), word(&of.uid), note.reason, note.message);
    let metadata = ObjectMeta {
        name: Some(format!(
            "{}.{:016x}",
            cut(&word(&of.name), LONGEST_PREFIX).trim_end_matches(['-', '.']),
            xxh3_64(said.as_bytes())
        )),
        namespace: of.namespace.clone(),
        ..ObjectMeta::default()
    };
    Event {
        metadata,
        event_time: Some(MicroTime(Timestamp::now())),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        action: Some("Reading".to_owned()),
        reason: Some(note.reason.to_owned()),
        note: Some(cut(&note.message, LONGEST)),
        type_: Some("Warning".to_owned()),
        regarding: Some(of.clone()),
        ..Event::default()
    }
}

/// As much of `text` as fits.
pub fn cut(text: &str, longest: usize) -> String {
    text[..text.floor_char_boundary(longest)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_twice_is_one_event() {
        let of = |uid: &str| ObjectReference {
            kind: Some("Pod".to_owned()),
            name: Some("p".to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        let note = |message: &str| Note { reason: "Invalid", message: message.to_owned() };
        let name = |uid: &str, message: &str| event(&of(uid), &note(message), "a").metadata.name;
        assert_eq!(name("1", "m"), event(&of("1"), &note("m"), "another").metadata.name);
        assert_ne!(name("1", "m"), name("2", "m"));
        assert_ne!(name("1", "m"), name("1", "n"));
        assert_eq!(event(&of("1"), &note(&"ä".repeat(600)), "a").note.unwrap().len(), 1024);
    }
}
