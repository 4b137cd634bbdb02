use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use obol_dial::Refused;
use obol_model::ProviderName;
use obol_model::snapshot::{Model, Provider, ProviderKind, Target};
use url::Url;

use crate::endpoint::Api;
use crate::llm::Credential;

/// One target of a model with everything that a publication says of its provider, made once per publication.
#[derive(Debug)]
pub struct Route {
    /// The target.
    pub target: Target,
    api: Api,
    base_url: Url,
    credential: Option<Credential>,
    allow_private: bool,
    most_output: Option<u64>,
    first_byte_timeout: Option<Duration>,
    idle_timeout: Option<Duration>,
    /// Names the target among those of all workspaces.
    pub(crate) key: Arc<str>,
}

impl Route {
    /// A target of `model`; `scope` tells the targets of one workspace from another's.
    pub fn new(
        scope: &str,
        model: &Model,
        target: Target,
        provider: &Provider,
        credential: Option<Credential>,
    ) -> Self {
        let seconds = |limit: Option<NonZeroU32>| limit.map(|s| Duration::from_secs(s.get().into()));
        let api = match provider.kind {
            ProviderKind::Openai => Api::OpenAi,
            ProviderKind::Anthropic => Api::Anthropic,
        };
        let key = format!("{scope}/{}/{}/{}", target.provider, target.model, provider.base_url).into();
        let Provider { base_url, allow_private, .. } = provider;
        Self {
            target,
            api,
            base_url: base_url.clone(),
            credential,
            allow_private: *allow_private,
            most_output: model.max_output,
            first_byte_timeout: seconds(model.first_byte_timeout_s),
            idle_timeout: seconds(model.idle_timeout_s),
            key,
        }
    }

    /// The provider's name in the workspace.
    pub fn provider(&self) -> &ProviderName {
        &self.target.provider
    }

    /// Whose API the provider speaks.
    pub fn api(&self) -> Api {
        self.api
    }

    /// The most tokens of one answer, sent where the client sets no limit of its own.
    pub fn most_output(&self) -> Option<u64> {
        self.most_output
    }

    pub(crate) fn first_byte_timeout(&self, otherwise: Duration) -> Duration {
        self.first_byte_timeout.unwrap_or(otherwise)
    }

    pub(crate) fn idle_timeout(&self, otherwise: Duration) -> Duration {
        self.idle_timeout.unwrap_or(otherwise)
    }

    pub(crate) fn credential(&self) -> Option<&Credential> {
        self.credential.as_ref()
    }

    pub(crate) fn allow_private(&self) -> bool {
        self.allow_private
    }

    /// Where a path below the base URL is.
    pub(crate) fn url<'a>(&self, path: impl Iterator<Item = &'a str>) -> Result<Url, Refused> {
        obol_dial::check(&self.base_url, self.allow_private)?;
        let mut url = self.base_url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        Ok(url)
    }
}
