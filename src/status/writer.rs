//! Writes reports to the API server, each only when it differs from what stands there.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams, ResourceExt};
use kube::core::ApiResource;
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::conditions::{Condition, Note, Report};
use super::events;
use crate::feed::kube::resource;
use crate::state::ObjectName;

/// Pause between two writes: a whole cluster's worth of reports must not crowd the API server.
const PAUSE: Duration = Duration::from_millis(50);
/// Longest pause before new reports are looked at. Replicas take different ones, so that one writes and the others find it
/// written.
const SETTLING: Duration = Duration::from_secs(1);
/// Pause after a write that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
const MANAGER: &str = "pilotfish";
/// How long what was refused is not tried again: rights change, and a namespace that ends refuses everything.
const REFUSED: Duration = Duration::from_mins(10);
const EVENTS: &str = "create on events.events.k8s.io";

/// Writes what objects are told.
pub struct Writer {
    client: Client,
    instance: String,
    said: HashMap<(Arc<str>, ObjectName), Report>,
    /// Kinds whose definition has no room for conditions.
    without_status: HashSet<Arc<str>>,
    /// What was refused in which namespace, and when.
    refused: HashMap<(String, Arc<str>), Instant>,
}

impl Writer {
    /// A writer that calls itself `instance`.
    pub fn new(client: Client, instance: String) -> Self {
        Self {
            client,
            instance,
            said: HashMap::new(),
            without_status: HashSet::new(),
            refused: HashMap::new(),
        }
    }

    /// Says the newest reports, for ever.
    pub async fn follow(mut self, mut reports: watch::Receiver<Arc<Vec<Report>>>) {
        while reports.changed().await.is_ok() {
            sleep(SETTLING.mul_f64(rand::random())).await;
            let newest = Arc::clone(&reports.borrow_and_update());
            self.forget_the_gone(&newest);
            for report in newest.iter() {
                let key = (Arc::clone(&report.kind), report.name.clone());
                if self.said.get(&key) == Some(report) {
                    continue;
                }
                match self.say(report).await {
                    Ok(()) => drop(self.said.insert(key, report.clone())),
                    // Nothing that a second attempt would change.
                    Err(Error::Api(refused)) if (400..500).contains(&refused.code) && refused.code != 429 => {
                        let why = refused.message;
                        tracing::warn!(kind = &*report.kind, name = %report.name, why, "a status was refused");
                        self.said.insert(key, report.clone());
                    }
                    Err(error) => {
                        tracing::debug!(kind = &*report.kind, name = %report.name, %error, "a status was not written");
                        sleep(AFTER_FAILURE).await;
                        reports.mark_changed();
                        break;
                    }
                }
                sleep(PAUSE).await;
            }
        }
    }

    fn is_refused(&self, what: &str, namespace: &Arc<str>) -> bool {
        let since = self.refused.get(&(what.to_owned(), Arc::clone(namespace)));
        since.is_some_and(|since| since.elapsed() < REFUSED)
    }

    fn note_refused(&mut self, what: &str, namespace: &Arc<str>) {
        tracing::warn!(
            %namespace,
            "objects are not told what is wrong with them: that takes the verb {what}; tried again with the next change after 10 minutes"
        );
        self.refused.retain(|_, since| since.elapsed() < REFUSED);
        self.refused.insert((what.to_owned(), Arc::clone(namespace)), Instant::now());
    }

    fn forget_the_gone(&mut self, newest: &[Report]) {
        let there: HashSet<(&str, &ObjectName)> =
            newest.iter().map(|report| (&*report.kind, &report.name)).collect();
        self.said.retain(|(kind, name), _| there.contains(&(&**kind, name)));
    }

    async fn say(&mut self, report: &Report) -> Result<(), Error> {
        let has_status = !report.conditions.is_empty() && !self.without_status.contains(&report.kind);
        let namespace = &report.name.namespace;
        let get = format!("get on {}", report.kind);
        let has_events = !report.notes.is_empty() && !self.is_refused(EVENTS, namespace);
        if !(has_status || has_events) || self.is_refused(&get, namespace) {
            return Ok(());
        }
        let Some(resource) = resource(&report.kind) else { return Ok(()) };
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &report.name.namespace, &resource);
        let object = match api.get_opt(&report.name.name).await {
            Ok(Some(object)) => object,
            // One that is gone needs to be told nothing.
            Ok(None) => return Ok(()),
            Err(Error::Api(refused)) if refused.is_forbidden() => {
                self.note_refused(&get, namespace);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        // One that has taken its name since is told when it has been read.
        if report.version.as_ref().is_some_and(|version| object.uid().as_deref() != Some(&*version.uid)) {
            return Ok(());
        }
        if has_status {
            self.write_status(&api, &resource, &object, report).await?;
        }
        if !has_status || self.without_status.contains(&report.kind) {
            self.tell(&resource, &object, &report.notes).await?;
        }
        Ok(())
    }

    async fn write_status(
        &mut self,
        api: &Api<DynamicObject>,
        resource: &ApiResource,
        object: &DynamicObject,
        report: &Report,
    ) -> Result<(), Error> {
        let status = status(report, &object.data["status"], Timestamp::now());
        if holds(&object.data["status"], &status) {
            return Ok(());
        }
        let patch = json!({"apiVersion": resource.api_version, "kind": resource.kind, "status": status});
        let params = PatchParams::apply(MANAGER).force();
        match api.patch_status(&report.name.name, &params, &Patch::Apply(patch)).await {
            Ok(written) if written.data["status"]["conditions"].is_array() => {}
            Ok(_) => {
                tracing::info!(
                    kind = &*report.kind,
                    "the installed definition keeps no conditions: what is wrong is told by events"
                );
                self.without_status.insert(Arc::clone(&report.kind));
            }
            Err(Error::Api(refused)) if refused.is_forbidden() => {
                self.note_refused(&format!("patch on {}/status", report.kind), &report.name.namespace);
            }
            Err(Error::Api(refused)) if refused.is_not_found() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn tell(
        &mut self,
        resource: &ApiResource,
        object: &DynamicObject,
        notes: &[Note],
    ) -> Result<(), Error> {
        let regarding = ObjectReference {
            api_version: Some(resource.api_version.clone()),
            kind: Some(resource.kind.clone()),
            namespace: object.namespace(),
            name: Some(object.name_any()),
            uid: object.uid(),
            ..ObjectReference::default()
        };
        let api: Api<Event> = Api::namespaced(self.client.clone(), &object.namespace().unwrap_or_default());
        for note in notes {
            let event = events::event(&regarding, note, &self.instance);
            match api.create(&PostParams::default(), &event).await {
                Ok(_) => {}
                Err(Error::Api(refused)) if refused.is_already_exists() => {}
                Err(Error::Api(refused)) if refused.is_forbidden() => {
                    self.note_refused(EVENTS, &object.namespace().unwrap_or_default().into());
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The status of a report. A condition that holds as before keeps its time.
fn status(report: &Report, before: &Value, now: Timestamp) -> Value {
    let generation = report.version.as_ref().and_then(|version| version.generation);
    let known = before["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    let written = |condition: &Condition| {
        let status = if condition.holds { "True" } else { "False" };
        let same = known.iter().find(|known| known["type"] == condition.kind && known["status"] == status);
        let since =
            same.map_or_else(|| json!(format!("{now:.0}")), |same| same["lastTransitionTime"].clone());
        json!({
            "type": condition.kind, "status": status, "reason": condition.reason, "message": condition.message,
            "lastTransitionTime": since, "observedGeneration": generation,
        })
    };
    let mut status = json!({
        "observedGeneration": generation,
        "conditions": report.conditions.iter().map(written).collect::<Vec<_>>(),
    });
    if let Some(endpoints) = report.endpoints {
        status["endpoints"] = json!(endpoints);
    }
    status
}

/// Whether `standing` says all that `wanted` does, whatever others say beside it.
fn holds(standing: &Value, wanted: &Value) -> bool {
    match (standing, wanted) {
        (Value::Object(standing), Value::Object(wanted)) => wanted.iter().all(|(name, value)| {
            value.is_null() || standing.get(name).is_some_and(|there| holds(there, value))
        }),
        (Value::Array(standing), Value::Array(wanted)) => {
            wanted.iter().all(|value| standing.iter().any(|there| holds(there, value)))
        }
        _ => standing == wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::feed::kube::Version;

    fn report(holds: bool, generation: i64) -> Report {
        Report {
            version: Some(Version { uid: "1".into(), generation: Some(generation) }),
            kind: "modelservers".into(),
            name: ObjectName::new("n", "s"),
            conditions: vec![Condition { kind: "Ready", holds, reason: "R", message: "m".to_owned() }],
            endpoints: Some(2),
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_condition_keeps_its_time_while_it_holds_as_before() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let first = status(&report(true, 1), &json!({}), at(60));
        assert_eq!(first["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
        let again = status(&report(true, 2), &first, at(120));
        assert_eq!(again["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
        assert_eq!(again["conditions"][0]["observedGeneration"], 2);
        let other = status(&report(false, 2), &first, at(120));
        assert_eq!(other["conditions"][0]["lastTransitionTime"], "1970-01-01T00:02:00Z");
    }

    #[test]
    fn what_stands_already_is_not_written_again() {
        let wanted = status(&report(true, 1), &json!({}), Timestamp::UNIX_EPOCH);
        let mut standing = wanted.clone();
        standing["conditions"].as_array_mut().unwrap().insert(0, json!({"type": "Others"}));
        assert!(holds(&standing, &wanted));
        assert!(!holds(&json!({}), &wanted));
        standing["endpoints"] = json!(3);
        assert!(!holds(&standing, &wanted));
    }
}
