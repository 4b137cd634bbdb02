//! Responses that are remembered.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// A response and what it takes to go on from it.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) response: Value,
    /// The items that its request brought.
    pub(super) input: Vec<Value>,
    /// Everything that was said so far, its own output included.
    pub(super) conversation: Vec<Value>,
    /// In the background: how it will look when it is complete, which it is from the first look on.
    pub(super) completes_as: Option<Value>,
}

#[derive(Debug, Default)]
pub(super) struct Store {
    responses: BTreeMap<String, Stored>,
}

impl Store {
    pub(super) fn ids(&self) -> Vec<String> {
        self.responses.keys().cloned().collect()
    }

    pub(super) fn keep(&mut self, id: &str, stored: Stored) {
        self.responses.insert(id.to_owned(), stored);
    }

    pub(super) fn get(&self, id: &str) -> Option<&Stored> {
        self.responses.get(id)
    }

    /// Looks at a response: one in the background gets on.
    pub(super) fn look(&mut self, id: &str) -> Option<Value> {
        let stored = self.responses.get_mut(id)?;
        if let Some(complete) = stored.completes_as.take() {
            stored.response = complete;
        }
        Some(stored.response.clone())
    }

    pub(super) fn forget(&mut self, id: &str) -> bool {
        self.responses.remove(id).is_some()
    }

    /// Cancels a response in the background; one that is over stays as it is. `None` is one that was not in the
    /// background.
    pub(super) fn cancel(&mut self, id: &str) -> Option<Value> {
        let stored = self.responses.get_mut(id)?;
        if stored.response["background"] != true {
            return None;
        }
        if stored.completes_as.take().is_some() {
            stored.response["status"] = json!("cancelled");
        }
        Some(stored.response.clone())
    }
}
