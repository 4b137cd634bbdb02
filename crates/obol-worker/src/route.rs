use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use obol_mcp::pool::TransportError;
use obol_mcp::wire::{self, Incoming, Message, Object};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::mpsc;

use crate::glance::{self, Glance};

/// Messages of one call that wait for its reader. More progress than that is dropped; the answer always has a place.
const CALL_BACKLOG: usize = 64;
/// Messages of no call that wait for their reader.
const UNSOLICITED_BACKLOG: usize = 256;

/// A message of a call, or why its answer cannot be had.
pub(crate) type Routed = Result<Bytes, TransportError>;

/// Which call each message of a child belongs to.
#[derive(Debug)]
pub(crate) struct Routes {
    /// `None` once the child is gone.
    calls: Mutex<Option<HashMap<u64, mpsc::Sender<Routed>>>>,
    unsolicited: Mutex<Option<mpsc::Receiver<Bytes>>>,
    max_calls: usize,
}

/// A call's place; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    routes: Arc<Routes>,
    id: u64,
    pub(crate) messages: mpsc::Receiver<Routed>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(calls) = self.routes.calls.lock().as_mut() {
            calls.remove(&self.id);
        }
    }
}

impl Routes {
    pub(crate) fn new(max_calls: usize) -> (Arc<Self>, mpsc::Sender<Bytes>) {
        let (send, receive) = mpsc::channel(UNSOLICITED_BACKLOG);
        let calls = Mutex::new(Some(HashMap::new()));
        (Arc::new(Self { calls, unsolicited: Mutex::new(Some(receive)), max_calls }), send)
    }

    pub(crate) fn register(self: &Arc<Self>, id: u64) -> Result<Registered, TransportError> {
        let mut calls = self.calls.lock();
        let calls = calls.as_mut().ok_or(TransportError::Unsent("its process has ended"))?;
        if calls.len() >= self.max_calls {
            return Err(TransportError::Unsent("it has too many calls in flight"));
        }
        let (send, messages) = mpsc::channel(CALL_BACKLOG);
        calls.insert(id, send);
        Ok(Registered { routes: Arc::clone(self), id, messages })
    }

    pub(crate) fn take_unsolicited(&self) -> Option<mpsc::Receiver<Bytes>> {
        self.unsolicited.lock().take()
    }

    /// The child is gone: every call learns it at once.
    pub(crate) fn end(&self) {
        self.calls.lock().take();
    }

    /// Ends the call whose answer this line, which is too long, begins; else says whether it may be an answer, so that
    /// its end is worth a look.
    pub(crate) fn too_long(&self, head: &[u8]) -> bool {
        match glance::begins(head) {
            Glance::Answer(id) => self.fail(id, TransportError::TooLarge),
            Glance::Perhaps => return true,
            Glance::Other => {}
        }
        false
    }

    /// The end of a line that is too long and may be an answer.
    pub(crate) fn long_end(&self, end: &[u8]) {
        let only = || {
            let calls = self.calls.lock();
            let calls = calls.as_ref()?;
            // With several in flight, a guess would take the answer away from one that still gets it.
            (calls.len() == 1).then(|| calls.keys().next().copied()).flatten()
        };
        if let Some(id) = glance::ends(end).or_else(only) {
            self.fail(id, TransportError::TooLarge);
        } else {
            tracing::warn!("an answer is too large and does not say whose it is");
        }
    }

    /// The call gets no answer.
    fn fail(&self, id: u64, why: TransportError) {
        let call = self.calls.lock().as_mut().and_then(|calls| calls.remove(&id));
        if call.is_none_or(|call| call.try_send(Err(why)).is_err()) {
            tracing::debug!("worker failed a call that nobody waits for");
        }
    }

    /// Routes one line. Returns false when it is no message.
    pub(crate) fn route(&self, line: &Bytes, unsolicited: &mpsc::Sender<Bytes>) -> bool {
        match wire::parse(line) {
            Ok(Incoming::Single(message)) => self.message(line, &message, unsolicited),
            Ok(Incoming::Batch(_)) => {
                for entry in serde_json::from_slice::<Vec<&RawValue>>(line).unwrap_or_default() {
                    let line = line.slice_ref(entry.get().as_bytes());
                    if let Ok(Incoming::Single(message)) = wire::parse(&line) {
                        self.message(&line, &message, unsolicited);
                    }
                }
            }
            Err(_) => {
                // `NaN` and the like: there is no other answer to wait for.
                if let Glance::Answer(id) = glance::begins(line) {
                    self.fail(id, TransportError::Protocol("its answer cannot be read"));
                }
                return false;
            }
        }
        true
    }

    fn message(&self, line: &Bytes, message: &Message<'_>, unsolicited: &mpsc::Sender<Bytes>) {
        match message {
            Message::Response { id, .. } => {
                let call =
                    id.get().parse::<u64>().ok().and_then(|id| self.calls.lock().as_mut()?.remove(&id));
                // A call that was given up has no place any more.
                if call.is_none_or(|call| call.try_send(Ok(line.clone())).is_err()) {
                    tracing::debug!("worker answered a call that nobody waits for");
                }
            }
            Message::Notification { method, params } if method == "notifications/progress" => {
                let token = params.and_then(|p| Object::parse(p.get()).ok()?.get("progressToken"));
                let Some(token) = token.and_then(|t| t.get().parse::<u64>().ok()) else { return };
                let calls = self.calls.lock();
                let Some(call) = calls.as_ref().and_then(|c| c.get(&token)) else { return };
                // The last place is the answer's.
                if call.capacity() < 2 || call.try_send(Ok(line.clone())).is_err() {
                    tracing::debug!("progress dropped, its reader is slow");
                }
            }
            Message::Request { .. } | Message::Notification { .. } => {
                if unsolicited.try_send(line.clone()).is_err() {
                    tracing::debug!("worker message dropped, its reader is slow or gone");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(token: u64, n: usize) -> Bytes {
        Bytes::from(format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{n}}}}}"#
        ))
    }

    #[test]
    fn a_flood_of_progress_leaves_room_for_the_answer() {
        let (routes, unsolicited) = Routes::new(10);
        let mut call = routes.register(1).unwrap();
        for n in 0..CALL_BACKLOG * 2 {
            assert!(routes.route(&progress(1, n), &unsolicited));
        }
        let answer = Bytes::from_static(br#"{"jsonrpc":"2.0","id":1,"result":{}}"#);
        routes.route(&answer, &unsolicited);
        let mut last = None;
        while let Ok(message) = call.messages.try_recv() {
            last = Some(message);
        }
        assert_eq!(last.unwrap(), Ok(answer));
    }

    #[test]
    fn messages_reach_the_call_that_they_belong_to() {
        let (routes, unsolicited) = Routes::new(2);
        let (mut one, mut two) = (routes.register(1).unwrap(), routes.register(2).unwrap());
        assert!(matches!(routes.register(3), Err(TransportError::Unsent(_))));
        routes.route(&progress(2, 0), &unsolicited);
        routes.route(&progress(9, 0), &unsolicited);
        routes.route(
            &Bytes::from_static(
                br#"[{"jsonrpc":"2.0","id":1,"result":{}},{"jsonrpc":"2.0","id":5,"method":"ping"}]"#,
            ),
            &unsolicited,
        );
        assert_eq!(two.messages.try_recv().unwrap(), Ok(progress(2, 0)));
        assert!(two.messages.try_recv().is_err());
        assert_eq!(one.messages.try_recv().unwrap().unwrap(), r#"{"jsonrpc":"2.0","id":1,"result":{}}"#);
        let mut others = routes.take_unsolicited().unwrap();
        assert_eq!(others.try_recv().unwrap(), r#"{"jsonrpc":"2.0","id":5,"method":"ping"}"#);
        assert!(!routes.route(&Bytes::from_static(b"{}"), &unsolicited));
    }

    #[test]
    fn an_answer_that_is_too_long_ends_its_call_and_no_other() {
        let (routes, _unsolicited) = Routes::new(9);
        let mut calls: Vec<Registered> = (1..=4).map(|id| routes.register(id).unwrap()).collect();
        let failed = |calls: &mut Vec<Registered>| -> Vec<u64> {
            let failed =
                |call: &mut Registered| call.messages.try_recv() == Ok(Err(TransportError::TooLarge));
            calls.extract_if(.., failed).map(|call| call.id).collect()
        };
        assert!(!routes.too_long(br#"{"jsonrpc":"2.0","id":2,"result":""#));
        assert_eq!(failed(&mut calls), [2]);
        assert!(!routes.too_long(br#"{"jsonrpc":"2.0","id":3,"method":"ping","params":""#), "a request");
        assert!(!routes.too_long(b"xxxxxxxxxxxxxxxx"));
        assert!(routes.too_long(br#"{"result":""#));
        routes.long_end(br#"aaa"},"jsonrpc":"2.0","id":4}"#);
        assert_eq!(failed(&mut calls), [4]);
        // Whose it is cannot be told, and of two none is guessed.
        routes.long_end(br#"aaa"}}"#);
        assert!(failed(&mut calls).is_empty());
        drop(calls.remove(0));
        routes.long_end(br#"aaa","id":1}"#);
        assert!(failed(&mut calls).is_empty(), "of a call that was given up");
        routes.long_end(br#"aaa"}}"#);
        assert_eq!(failed(&mut calls), [3]);
    }

    #[test]
    fn an_answer_that_is_no_json_ends_its_call() {
        let (routes, unsolicited) = Routes::new(9);
        let mut call = routes.register(1).unwrap();
        let line = Bytes::from_static(br#"{"jsonrpc":"2.0","id":1,"result":{"score":NaN}}"#);
        assert!(!routes.route(&line, &unsolicited));
        assert!(matches!(call.messages.try_recv(), Ok(Err(TransportError::Protocol(_)))));
    }

    #[test]
    fn the_end_is_told_to_every_call_and_closes_the_door() {
        let (routes, _unsolicited) = Routes::new(2);
        let mut call = routes.register(1).unwrap();
        routes.end();
        assert_eq!(call.messages.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
        assert!(routes.register(2).is_err());
    }
}
