//! How fast an endpoint is, as its document says: `weight`, and the GPU it runs on.

use std::collections::BTreeMap;

use super::Report;
use crate::state::rates::Speed;

/// The annotation that says what `weight` says.
pub const WEIGHT: &str = "pilotfish.dev/weight";
/// The annotation that names the GPU.
pub const GPU: &str = "pilotfish.dev/gpu";

/// Weight and GPU; none if the weight is wrong. What `written` in the document's `spec.weight` says wins over the annotation.
pub(super) fn speed(
    written: Option<f64>,
    annotations: &BTreeMap<String, String>,
    report: &mut Report<'_>,
) -> Option<(f32, Speed)> {
    let (weight, path): (_, &[&str]) = match (written, annotations.get(WEIGHT)) {
        (Some(weight), _) => (Some(weight), &["spec", "weight"]),
        (None, Some(text)) => (text.parse().ok(), &["metadata", "annotations", WEIGHT]),
        (None, None) => (Some(1.0), &["spec"]),
    };
    let Some(weight) = weight.filter(|weight| weight.is_finite() && *weight > 0.0) else {
        let shown = written.map_or_else(|| format!("{:?}", annotations.get(WEIGHT)), |w| w.to_string());
        report.error(path, format!("weight must be above 0, not {shown}"), None);
        return None;
    };
    let gpu = annotations.get(GPU).map_or(Speed::default(), |name| {
        Speed::of_gpu(name).unwrap_or_else(|| {
            let advice = Some("known are A100, H100 and L4: write a `weight` instead".to_owned());
            let why = format!("nothing is known of the speed of GPU `{name}`");
            report.warning(&["metadata", "annotations", GPU], why, advice);
            Speed::default()
        })
    });
    Some((weight as f32, gpu))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::resources::lower::lower;
    use rstest::rstest;

    #[rstest]
    #[case("{pilotfish.dev/weight: '2'}", "", Some(2.0))]
    #[case("{pilotfish.dev/weight: '2'}", ", weight: 3", Some(3.0))]
    #[case("{pilotfish.dev/weight: heavy}", "", None)]
    #[case("{pilotfish.dev/weight: '0'}", "", None)]
    #[case("{}", "", Some(1.0))]
    fn the_weight_is_the_documents_then_the_annotations(
        #[case] annotations: &str,
        #[case] more: &str,
        #[case] expected: Option<f32>,
    ) {
        let text = format!(
            "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {{name: e, annotations: {annotations}}}\n\
             spec: {{address: '10.0.0.1:80'{more}}}\n"
        );
        let lowered = lower(&[("e.yaml", Arc::from(text))]);
        assert_eq!(lowered.world.endpoints.first().map(|endpoint| endpoint.weight), expected);
        assert_eq!(lowered.problems.is_empty(), expected.is_some(), "{:?}", lowered.problems);
    }

    #[test]
    fn a_gpu_without_published_times_is_a_warning_and_counts_as_usual() {
        let of = |gpu: &str| {
            let text = format!(
                "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n\
                 metadata: {{name: e, annotations: {{pilotfish.dev/gpu: {gpu}}}}}\nspec: {{address: '10.0.0.1:80'}}\n"
            );
            let lowered = lower(&[("e.yaml", Arc::from(text))]);
            (lowered.world.endpoints[0].gpu.prefill, lowered.problems.len())
        };
        assert!(of("H100").0 > 3.0);
        assert_eq!(of("Abacus"), (1.0, 1));
    }
}
