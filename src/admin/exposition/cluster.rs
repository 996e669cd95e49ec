//! How current what is read of the cluster is, and what of it cannot be used.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::Family;
use crate::admin::Documents;
use crate::document::{Problem, Severity};
use crate::feed::kube::{Watches, resource};

/// Everything about objects and pods.
pub fn cluster(encoder: &mut DescriptorEncoder<'_>, watches: &Watches, documents: &Documents) -> fmt::Result {
    let kinds = watches.kinds();
    let help = "Seconds since what is known of a kind of object was current; 0 while it is";
    let mut family = Family::new(encoder, "kubernetes_age_seconds", help, MetricType::Gauge)?;
    for kind in &kinds {
        family.gauge([("kind", kind.label.as_str())], kind.age.as_secs_f64())?;
    }
    let help = "Whether a kind of object is not installed, or may not be read";
    let mut family = Family::new(encoder, "crd_unavailable", help, MetricType::Gauge)?;
    for kind in &kinds {
        family.gauge([("kind", kind.label.as_str())], f64::from(u8::from(kind.unavailable)))?;
    }
    let help = "Ready pods that a pool selects and cannot use";
    let mut family = Family::new(encoder, "pods_unroutable", help, MetricType::Gauge)?;
    let mut unroutable = BTreeMap::from([("address", 0_u32), ("port", 0)]);
    for pod in &documents.unroutable {
        *unroutable.entry(pod.reason).or_default() += 1;
    }
    for (reason, pods) in unroutable {
        family.gauge([("reason", reason)], f64::from(pods))?;
    }
    let help = "Errors in an object of a cluster, or in a file of resources";
    let mut family = Family::new(encoder, "config_errors", help, MetricType::Gauge)?;
    for ((kind, name), errors) in errors(&documents.resource_problems) {
        family.gauge([("kind", &*kind), ("name", &*name)], f64::from(errors))?;
    }
    Ok(())
}

fn errors(problems: &[Problem]) -> BTreeMap<(String, String), u32> {
    let mut errors = BTreeMap::new();
    for problem in problems.iter().filter(|problem| problem.severity == Severity::Error) {
        *errors.entry(kind_and_name(&problem.file)).or_default() += 1;
    }
    errors
}

/// Objects of a cluster are reported as `KIND/NAMESPACE/NAME`; everything else is a file.
fn kind_and_name(file: &Path) -> (String, String) {
    let parts: Vec<_> = file.iter().map(|part| part.to_string_lossy()).collect();
    match &parts[..] {
        [kind, namespace, name] if resource(kind).is_some() => {
            (kind.to_string(), format!("{namespace}/{name}"))
        }
        _ => ("file".to_owned(), file.display().to_string()),
    }
}
