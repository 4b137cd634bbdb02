use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::sync::Arc;

use obol_model::{ConnectionName, ModelName, ProviderName};
use parking_lot::RwLock;

use crate::request::HASHES;
use crate::{Action, Caller, Decision, Era, PriceClass, Request, Resource};

const SHARDS: usize = 16;
const PER_SHARD: usize = 2048;
/// Questions with more text than this are answered without the cache: clients choose their names, upstreams their
/// URIs, and neither may choose how much memory is kept.
const LONGEST_TEXT: usize = 1024;

/// Answers to questions without arguments, at most `SHARDS * PER_SHARD`.
///
/// A full shard is emptied: the working set of a list comes back with the next list, and a policy set lives only as
/// long as its publication, so an order of use would cost more on every hit than it saves.
#[derive(Debug)]
pub(crate) struct Cache {
    shards: [RwLock<HashMap<u64, Entry>>; SHARDS],
}

/// What an answer depends on. Compared in full on every hit: a hash alone would let a collision grant something.
#[derive(PartialEq, Eq, Hash)]
struct Question<'a> {
    caller: &'a Caller,
    action: Action,
    resource: Resource<'a>,
    environment: &'a str,
    client: Option<&'a str>,
    era: Era,
}

#[derive(Debug)]
struct Entry {
    caller: Caller,
    action: Action,
    resource: OwnedResource,
    environment: Box<str>,
    client: Option<Box<str>>,
    era: Era,
    decision: Arc<Decision>,
}

#[derive(Debug)]
enum OwnedResource {
    Connection(ConnectionName),
    Tool { connection: ConnectionName, name: Box<str>, destructive: bool, read_only: bool },
    Resource { connection: ConnectionName, uri: Box<str> },
    Prompt { connection: ConnectionName, name: Box<str> },
    Model { name: ModelName, provider: ProviderName, price_class: PriceClass },
}

impl Cache {
    #[cfg(test)]
    pub(crate) const CAPACITY: usize = SHARDS * PER_SHARD;

    pub(crate) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::default()) }
    }

    /// The kept answer, or the one that `evaluate` gives, which is kept.
    pub(crate) fn get_or(&self, request: &Request<'_>, evaluate: impl FnOnce() -> Decision) -> Arc<Decision> {
        let question = Question::of(request);
        if question.text_len() > LONGEST_TEXT {
            return Arc::new(evaluate());
        }
        let hash = HASHES.hash_one(&question);
        let Some(shard) = self.shards.get(usize::try_from(hash >> 60).unwrap_or_default()) else {
            return Arc::new(evaluate());
        };
        if let Some(entry) = shard.read().get(&hash)
            && entry.question() == question
        {
            return Arc::clone(&entry.decision);
        }
        let decision = Arc::new(evaluate());
        let mut entries = shard.write();
        if entries.len() >= PER_SHARD {
            entries.clear();
        }
        entries.insert(hash, Entry::new(&question, Arc::clone(&decision)));
        decision
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.read().len()).sum()
    }
}

impl<'a> Question<'a> {
    fn of(request: &Request<'a>) -> Self {
        let Request { caller, action, resource, context } = *request;
        let (environment, client, era) = (context.environment, context.client, context.era);
        Self { caller, action, resource, environment, client, era }
    }

    fn text_len(&self) -> usize {
        let resource = match self.resource {
            Resource::Connection(_) | Resource::Model { .. } => 0,
            Resource::Tool { name, .. } | Resource::Prompt { name, .. } => name.len(),
            Resource::Resource { uri, .. } => uri.len(),
        };
        resource + self.environment.len() + self.client.map_or(0, str::len)
    }
}

impl Entry {
    fn new(question: &Question<'_>, decision: Arc<Decision>) -> Self {
        Self {
            caller: question.caller.clone(),
            action: question.action,
            resource: OwnedResource::of(question.resource),
            environment: question.environment.into(),
            client: question.client.map(Into::into),
            era: question.era,
            decision,
        }
    }

    fn question(&self) -> Question<'_> {
        Question {
            caller: &self.caller,
            action: self.action,
            resource: self.resource.borrow(),
            environment: &self.environment,
            client: self.client.as_deref(),
            era: self.era,
        }
    }
}

impl OwnedResource {
    fn of(resource: Resource<'_>) -> Self {
        match resource {
            Resource::Connection(name) => Self::Connection(name.clone()),
            Resource::Tool { connection, name, destructive, read_only } => {
                Self::Tool { connection: connection.clone(), name: name.into(), destructive, read_only }
            }
            Resource::Resource { connection, uri } => {
                Self::Resource { connection: connection.clone(), uri: uri.into() }
            }
            Resource::Prompt { connection, name } => {
                Self::Prompt { connection: connection.clone(), name: name.into() }
            }
            Resource::Model { name, provider, price_class } => {
                Self::Model { name: name.clone(), provider: provider.clone(), price_class }
            }
        }
    }

    fn borrow(&self) -> Resource<'_> {
        match self {
            Self::Connection(name) => Resource::Connection(name),
            Self::Tool { connection, name, destructive, read_only } => {
                Resource::Tool { connection, name, destructive: *destructive, read_only: *read_only }
            }
            Self::Resource { connection, uri } => Resource::Resource { connection, uri },
            Self::Prompt { connection, name } => Resource::Prompt { connection, name },
            Self::Model { name, provider, price_class } => {
                Resource::Model { name, provider, price_class: *price_class }
            }
        }
    }
}
