use axum::response::Response;
use http::HeaderValue;

use crate::front::Admitted;

/// What every answer says of its request: the id that logs and usage have, and the revision that decided, where the
/// workspace wants that to be seen (DESIGN §7.2).
#[derive(Debug)]
pub(crate) struct Stamp {
    request_id: Option<HeaderValue>,
    revision: Option<HeaderValue>,
}

impl Stamp {
    pub(crate) fn of(admitted: &Admitted) -> Self {
        let publication = &admitted.publication;
        let shown = publication.workspace.expose_revision;
        Self {
            request_id: HeaderValue::try_from(admitted.request_id.to_string()).ok(),
            revision: shown.then(|| HeaderValue::try_from(publication.revision().to_string()).ok()).flatten(),
        }
    }

    pub(crate) fn put(self, response: &mut Response) {
        let headers = response.headers_mut();
        if let Some(id) = self.request_id {
            headers.insert("x-request-id", id);
        }
        if let Some(revision) = self.revision {
            headers.insert("x-obol-revision", revision);
        }
    }
}
