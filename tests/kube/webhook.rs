//! The validating webhook, called by a real API server.

use http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::eventually::eventually;
use crate::kit::kube::Cluster;
use crate::kit::picker::Picker;
use crate::kit::tls::Ca;

const SERVING: &str = "networking.serving.volcano.sh/v1alpha1";

/// A namespace whose objects a picker validates.
struct Stand {
    cluster: Cluster,
    picker: Picker,
    ca: Ca,
    certificates: TempDir,
}

/// What the API server answered.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    warnings: Vec<String>,
    message: String,
}

impl Stand {
    async fn start() -> Self {
        let cluster = Cluster::namespace().await;
        let ca = Ca::new("webhook");
        let certificates = TempDir::new().unwrap();
        ca.issue().write(certificates.path());
        let picker = Picker::of_cluster(&cluster)
            .flag("--webhook-port", "0")
            .flag("--webhook-cert-path", certificates.path().to_str().unwrap())
            .start()
            .await;
        picker.until_ready().await;
        let stand = Self { cluster, picker, ca, certificates };
        stand.configure().await;
        stand
    }

    /// Has the API server ask the picker about this namespace.
    async fn configure(&self) {
        let address = self.picker.app.bound.webhook.unwrap();
        let ca = json!(base64::Engine::encode(&base64::engine::general_purpose::STANDARD, self.ca.pem()));
        let namespace = &self.cluster.namespace;
        let rule = json!({"operations": ["CREATE", "UPDATE", "DELETE"], "apiVersions": ["*"], "resources": ["*"],
            "apiGroups": ["networking.serving.volcano.sh", "inference.networking.k8s.io", "llm-d.ai"]});
        let webhook = json!({
            "name": "validate.pilotfish.dev",
            "clientConfig": {"url": format!("https://127.0.0.1:{}/validate", address.port()), "caBundle": ca},
            "rules": [rule],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        });
        let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration", "metadata": {"name": namespace}, "webhooks": [webhook]});
        self.cluster.try_apply(&configuration, false).await.unwrap();
        eventually("the API server asks the webhook", async || {
            let answer = self.create(&route("probe", "(", "s"), true).await;
            (answer.status != StatusCode::CREATED).then_some(())
        })
        .await;
    }

    async fn create(&self, object: &Value, dry_run: bool) -> Answer {
        let kind = object["kind"].as_str().unwrap().to_lowercase();
        self.ask("POST", &format!("{kind}s{}", if dry_run { "?dryRun=All" } else { "" }), object).await
    }

    async fn ask(&self, method: &str, path: &str, object: &Value) -> Answer {
        let namespace = &self.cluster.namespace;
        let request = Request::builder()
            .method(method)
            .uri(format!("/apis/{SERVING}/namespaces/{namespace}/{path}"))
            .header(
                header::CONTENT_TYPE,
                if method == "PATCH" { "application/merge-patch+json" } else { "application/json" },
            )
            .body(Body::from(object.to_string().into_bytes()))
            .unwrap();
        let response = self.cluster.client.send(request).await.unwrap();
        let warnings = response.headers().get_all(header::WARNING).iter();
        let warnings = warnings.map(|value| value.to_str().unwrap().to_owned()).collect();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&body).unwrap();
        Answer { status, warnings, message: body["message"].as_str().unwrap_or_default().to_owned() }
    }
}

fn route(name: &str, regex: &str, target: &str) -> Value {
    let rule = json!({"modelMatch": {"headers": {"x-tier": {"regex": regex}}}, "targetModels": [{"modelServerName": target}]});
    json!({"apiVersion": SERVING, "kind": "ModelRoute", "metadata": {"name": name},
        "spec": {"modelName": "m", "rules": [rule]}})
}

fn server(name: &str) -> Value {
    json!({"apiVersion": SERVING, "kind": "ModelServer", "metadata": {"name": name}, "spec": {"inferenceEngine": "vLLM",
        "workloadSelector": {"matchLabels": {"app": "x"}}, "workloadPort": {"port": 8000}}})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_is_told_what_no_definition_can_say() {
    let stand = Stand::start().await;
    let denied = stand.create(&route("bad", "(", "s"), false).await;
    assert_eq!(denied.status, StatusCode::UNPROCESSABLE_ENTITY, "{denied:?}");
    assert!(
        denied.message.contains("denied the request: `(` is not a regular expression: unclosed group"),
        "{denied:?}"
    );

    // A target may come later.
    let early = stand.create(&route("early", "^a", "s"), false).await;
    assert_eq!((early.status, early.warnings.len()), (StatusCode::CREATED, 1), "{early:?}");
    assert!(early.warnings[0].contains("is not known here yet"), "{early:?}");
    let created = stand.create(&server("s"), false).await;
    assert_eq!((created.status, created.warnings.len()), (StatusCode::CREATED, 0), "{created:?}");
    eventually("the picker knows the server", async || {
        let answer = stand.create(&route("late", "^a", "s"), true).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        answer.warnings.is_empty().then_some(())
    })
    .await;

    let worse = json!({"spec": route("", "[", "s")["spec"]});
    let changed = stand.ask("PATCH", "modelroutes/early", &worse).await;
    assert_eq!(changed.status, StatusCode::UNPROCESSABLE_ENTITY, "{changed:?}");
    let gone = stand.ask("DELETE", "modelroutes/early", &json!({})).await;
    assert_eq!(gone.status, StatusCode::OK, "{gone:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_certificate_is_served_without_a_restart() {
    let mut stand = Stand::start().await;
    stand.ca = Ca::new("next");
    stand.ca.issue().write(stand.certificates.path());
    // Denied because the certificate is of a CA that is not in the bundle any more, until it was read.
    stand.configure().await;
    eventually("the API server trusts the webhook", async || {
        let answer = stand.create(&server("s"), true).await;
        (answer.status == StatusCode::CREATED).then_some(())
    })
    .await;
}
