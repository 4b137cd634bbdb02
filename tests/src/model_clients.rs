//! The official OpenAI and Anthropic SDKs, each in Python and in TypeScript (`tests/clients/llm_*`).

use std::collections::BTreeMap;
use std::time::Duration;

use obol_testkit::process::Spec;
use serde_json::Value;

use crate::setup::{node, python, scenarios};

/// Longest run of a client.
const CLIENT: Duration = Duration::from_secs(65);

/// What the clients are to do.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// The server, without a path: what its SDK adds to that is its own affair.
    pub origin: &'a str,
    /// The key.
    pub key: &'a str,
    /// The model of all scenarios but one.
    pub model: &'a str,
    /// The model of embeddings.
    pub embedding_model: Option<&'a str>,
    /// The scenarios by name; none are all.
    pub scenarios: &'a [&'a str],
}

/// What a scenario found, by its name.
pub type Found = BTreeMap<String, Value>;

impl Run<'_> {
    /// Runs both of OpenAI's SDKs. They have to find the same.
    ///
    /// # Panics
    /// When one fails or the two differ.
    pub async fn openai(&self) -> Found {
        let url = format!("{}/v1", self.origin);
        self.both(&url, "clients/llm_openai.py", "clients/llm_openai.mjs").await
    }

    /// Runs both of Anthropic's SDKs. They have to find the same.
    ///
    /// # Panics
    /// When one fails or the two differ.
    pub async fn anthropic(&self) -> Found {
        self.both(self.origin, "clients/llm_anthropic.py", "clients/llm_anthropic.mjs").await
    }

    async fn both(&self, url: &str, in_python: &str, in_node: &str) -> Found {
        let of = |spec: Spec| scenarios(self.told(spec, url), CLIENT);
        let (mut python, mut node) = tokio::join!(of(python("OBOL_TEST_PY1", in_python)), of(node(in_node)));
        for found in python.values_mut().chain(node.values_mut()) {
            for who in ["scenario", "sdk", "version"] {
                found.as_object_mut().expect("a line is an object").remove(who);
            }
        }
        assert_eq!(python, node, "Python found the left, TypeScript the right");
        python
    }

    fn told(&self, spec: Spec, url: &str) -> Spec {
        let mut spec = spec.args(["--url", url, "--key", self.key, "--model", self.model]);
        if let Some(model) = self.embedding_model {
            spec = spec.args(["--embedding-model", model]);
        }
        if !self.scenarios.is_empty() {
            spec = spec.args(["--scenarios", &self.scenarios.join(",")]);
        }
        spec
    }
}
