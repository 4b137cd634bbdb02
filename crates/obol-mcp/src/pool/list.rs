use std::sync::Arc;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::session::error_code;
use super::{Call, CallError, Endpoint, Event, ListKind, Pool, ServerCapabilities};
use crate::wire::{self, Object, RpcError};

impl Pool {
    /// Everything that the server lists, all pages (pagination, "Pagination Flow"), each item as the text that came.
    /// A server that does not have the capability is not asked and has nothing.
    ///
    /// # Errors
    /// When the server cannot be asked, or lists more than the bounds: a list that is silently cut is worse than none.
    pub async fn list(
        self: &Arc<Self>,
        endpoint: &Arc<Endpoint>,
        what: ListKind,
        deadline: Instant,
    ) -> Result<Vec<Box<RawValue>>, CallError> {
        let offered = {
            let slot = self.slot(endpoint)?;
            let lease = self.take(&slot, deadline).await?;
            offers(&lease.session().known.capabilities, what)
        };
        let mut items = Vec::new();
        if !offered {
            return Ok(items);
        }
        let (mut cursor, mut bytes) = (None::<Box<RawValue>>, 0);
        for _ in 0..self.options.max_list_pages {
            let Some(page) = self.page(endpoint, what, cursor.as_deref(), deadline).await? else { break };
            bytes += page.len();
            let next = read_page(&page, what, &mut items)?;
            if items.len() > self.options.max_list_items || bytes > self.options.max_list_bytes {
                return Err(CallError::TooLarge);
            }
            match next {
                None => return Ok(items),
                // A server that ignores the cursor would send its first page for ever.
                Some(next) if cursor.as_ref().is_some_and(|c| c.get() == next.get()) => {
                    return Err(CallError::Protocol { reason: "its list has no end" });
                }
                Some(next) => cursor = Some(next),
            }
        }
        if cursor.is_some() { Err(CallError::TooLarge) } else { Ok(items) }
    }

    /// One page; `None` when the server does not know the method although it has the capability, as many do with
    /// resource templates.
    async fn page(
        self: &Arc<Self>,
        endpoint: &Arc<Endpoint>,
        what: ListKind,
        cursor: Option<&RawValue>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, CallError> {
        let params = cursor.map(|c| format!(r#"{{"cursor":{c}}}"#));
        let call = Call {
            method: what.method(),
            params: params.as_deref(),
            progress_token: None,
            log_level: None,
            deadline,
        };
        let mut exchange = self.call(endpoint, call).await?;
        while let Some(event) = exchange.next().await {
            match event? {
                Event::Notification(_) => {}
                Event::Result(page) => return Ok(Some(page)),
                Event::Error(error) => match error_code(&error) {
                    RpcError::METHOD_NOT_FOUND => return Ok(None),
                    code => return Err(CallError::Refused { code }),
                },
            }
        }
        Err(CallError::Interrupted)
    }
}

fn offers(capabilities: &ServerCapabilities, what: ListKind) -> bool {
    match what {
        ListKind::Tools => capabilities.tools.is_some(),
        ListKind::Resources | ListKind::ResourceTemplates => capabilities.resources.is_some(),
        ListKind::Prompts => capabilities.prompts.is_some(),
    }
}

/// Adds the items of a page and returns the cursor of the next one.
fn read_page(
    page: &[u8],
    what: ListKind,
    items: &mut Vec<Box<RawValue>>,
) -> Result<Option<Box<RawValue>>, CallError> {
    let unreadable = CallError::Protocol { reason: "its list cannot be read" };
    let read = || {
        let object = Object::parse(std::str::from_utf8(page).ok()?).ok()?;
        let found = wire::array(object.get(what.member())?)?;
        let next = object.get("nextCursor").filter(|c| c.get().starts_with('"') && c.get() != r#""""#);
        Some((found.into_iter().map(ToOwned::to_owned).collect::<Vec<_>>(), next.map(ToOwned::to_owned)))
    };
    let (found, next) = read().ok_or(unreadable)?;
    items.extend(found);
    Ok(next)
}
