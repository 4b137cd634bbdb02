use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;
use obol_llm::{Account, Endpoint, LlmError, LlmRequest, Prompt, Route, Usage};
use obol_meter::{Attempt, Denied, Recorder, StoredAnswer, UsageGuard};
use obol_model::{Causes, Clock, NanoUsd, Outcome, Principal, Tokens, WorkspaceId};
use obol_session::{Binding, Bindings};
use tokio::time::Instant;

use crate::toll;

/// The account of one call: what is set aside for it, and what it comes to.
///
/// Whatever ends the call, a client that leaves included, the guard learns what a provider may have worked on by then: its
/// prompt is due, by estimate (DESIGN §12.2, §12.3). The caller is charged for the target that answered; when none did,
/// for the last one that may ask to be paid. What attempts before it cost is noted, and is the operator's.
pub(super) struct Bill {
    guard: Option<UsageGuard>,
    endpoint: Endpoint,
    prompt: Prompt,
    clock: Arc<dyn Clock>,
    most: Most,
    /// The last target that may ask to be paid, though nothing of an answer is known.
    due: Option<Arc<Route>>,
    /// The same before the attempt that is under way.
    due_before: Option<Arc<Route>>,
    /// The target that answers.
    served: Option<Arc<Route>>,
    began: (Timestamp, Instant),
    used: Usage,
    binder: Option<Binder>,
    /// What a stream says, for a caller that may ask again.
    recorder: Option<Recorder>,
}

/// Notes whose an answer is that the provider keeps.
pub(super) struct Binder {
    pub(super) bindings: Arc<dyn Bindings>,
    pub(super) workspace: WorkspaceId,
    pub(super) principal: Principal,
}

impl Binder {
    /// An answer that cannot be bound is nobody's: later requests do not find it.
    async fn bind(&self, route: &Route, id: &str, tokens: u64) {
        let target = &route.target;
        let principal = self.principal.to_string();
        let binding = Binding::new(principal, target.provider.clone(), target.model.clone(), tokens);
        if let Err(e) = self.bindings.bind(&self.workspace, id, &binding).await {
            tracing::warn!(error = %Causes(&e), "a stored answer is lost to its caller");
        }
    }
}

/// The most tokens that a call can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Most {
    pub(super) input: u64,
    pub(super) output: u64,
}

impl Most {
    /// What a call of a target can cost.
    pub(super) fn cost(self, route: &Route) -> NanoUsd {
        route.target.price.worst(self.input, self.output)
    }

    pub(super) fn tokens(self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

impl Bill {
    pub(super) fn new(
        guard: UsageGuard,
        request: &LlmRequest,
        clock: Arc<dyn Clock>,
        most: Most,
        binder: Option<Binder>,
    ) -> Self {
        Self {
            recorder: request.is_stream().then(|| guard.recorder()).flatten(),
            guard: Some(guard),
            endpoint: request.endpoint(),
            prompt: request.prompt(),
            began: (clock.now(), Instant::now()),
            clock,
            most,
            due: None,
            due_before: None,
            served: None,
            used: Usage::default(),
            binder,
        }
    }

    /// Keeps a whole answer for whoever sends the request again under its idempotency key.
    pub(super) fn remember(&mut self, answer: StoredAnswer) {
        if let Some(guard) = &mut self.guard {
            guard.remember(answer);
        }
    }

    fn note(&mut self, route: &Route, outcome: Outcome, usage: Usage) {
        let (started_at, began) = self.began;
        let attempt = Attempt {
            provider: route.provider().clone(),
            upstream_model: route.target.model.clone(),
            outcome,
            started_at,
            duration_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            tokens: usage.tokens,
            estimated: usage.estimated,
            price: route.target.price.clone(),
        };
        if let Some(guard) = &mut self.guard {
            guard.attempt(attempt);
        }
    }

    /// The prompt, which a provider that worked has read.
    fn of_prompt(&self) -> Usage {
        let tokens = Tokens { input: self.prompt.tokens(), ..Tokens::default() };
        Usage { tokens, estimated: true }
    }

    fn used_tokens(&self) -> u64 {
        self.used.tokens.prompt().saturating_add(self.used.tokens.completion())
    }

    /// Hands the guard what is known. `None` for the outcome: nobody saw the end.
    fn settle(&mut self, outcome: Option<Outcome>) -> Option<UsageGuard> {
        if let Some(route) = self.served.take() {
            self.note(&route, outcome.unwrap_or(Outcome::Partial), self.used);
        }
        let due = self.due.take();
        let usage = due.as_ref().map_or(self.used, |_| self.of_prompt());
        let guard = self.guard.as_mut()?;
        if let Some(Route { target, .. }) = due.as_deref() {
            guard.served_by(&target.provider, &target.model, target.price.clone());
        }
        guard.set_tokens(usage.tokens, usage.estimated);
        self.guard.take()
    }
}

impl Account for Bill {
    async fn afford(&mut self, route: &Arc<Route>) -> Result<(), LlmError> {
        let worst = self.most.cost(route);
        if let Some(guard) = &mut self.guard {
            guard.top_up(worst, self.most.tokens()).await.map_err(|denied| too_dear(&denied, worst))?;
        }
        self.began = (self.clock.now(), Instant::now());
        self.due_before = self.due.replace(route.clone());
        Ok(())
    }

    fn failed(&mut self, route: &Arc<Route>, _: &LlmError, may_have_worked: bool) {
        let (outcome, usage) = if may_have_worked {
            (Outcome::Partial, self.of_prompt())
        } else {
            self.due = self.due_before.take();
            (Outcome::Error, Usage::default())
        };
        self.note(route, outcome, usage);
    }

    async fn answered(&mut self, route: &Arc<Route>, response_id: Option<&str>) {
        self.due = None;
        self.served = Some(route.clone());
        if let Some(guard) = &mut self.guard {
            let target = &route.target;
            guard.served_by(&target.provider, &target.model, target.price.clone());
        }
        if let (Some(binder), Some(id)) = (&self.binder, response_id) {
            // Of a stream only the worst is known, and it has to be bound before its id is seen.
            let tokens =
                Some(self.used_tokens()).filter(|used| *used > 0).unwrap_or_else(|| self.most.tokens());
            binder.bind(route, id, tokens).await;
        }
    }

    async fn ended(&mut self, response_id: Option<&str>) {
        if let (Some(binder), Some(id), Some(route)) = (&self.binder, response_id, &self.served) {
            binder.bind(route, id, self.used_tokens()).await;
        }
    }

    fn used(&mut self, usage: Usage) {
        self.used = usage;
    }

    fn relayed(&mut self, bytes: &Bytes) {
        if let Some(recorder) = &mut self.recorder {
            recorder.record(bytes);
        }
    }

    fn close(mut self, outcome: Outcome) {
        let recorder = self.recorder.take().filter(|_| outcome == Outcome::Ok);
        let Some(mut guard) = self.settle(Some(outcome)) else { return };
        if let Some(recorder) = recorder {
            guard.remember_recorded(recorder, 200, "text/event-stream");
        }
        if self.endpoint == Endpoint::CountTokens {
            // Nobody bills for it; it was admitted for the rates alone.
            guard.cancel();
        } else {
            guard.finish(outcome);
        }
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        drop(self.settle(None));
    }
}

/// A target that the caller's money does not reach.
fn too_dear(denied: &Denied, worst: NanoUsd) -> LlmError {
    toll::log(denied);
    LlmError::Denied {
        kind: denied.kind(),
        code: denied.code(),
        message: toll::message(denied, worst),
        retry_after: denied.reset(),
    }
}

#[cfg(test)]
mod tests {
    use obol_llm::Endpoint;
    use obol_meter::{EmbeddedLedger, MeterOptions, Price, Start, Terms, meter};
    use obol_model::snapshot::{Model, Provider, ProviderKind, Target};
    use obol_model::{
        EventPart, ManualClock, ModelCall, PerMillion, Principal, ReplicaId, RequestId, Revision, TokenPrice,
        UsageEvent, UsageKind,
    };
    use tokio_util::sync::CancellationToken;

    use super::*;

    fn usd(n: u64) -> PerMillion {
        PerMillion::new(NanoUsd::new(n * 1_000_000_000))
    }

    /// The events of a call of two targets, of which the second is three times as dear.
    async fn events(call: impl AsyncFnOnce(&mut Bill, [Arc<Route>; 2])) -> Vec<UsageEvent> {
        let clock = Arc::new(ManualClock::new("2026-01-02T03:04:05Z".parse().unwrap()));
        let ledger = Arc::new(EmbeddedLedger::new(clock.clone(), 8));
        let (meter, flusher) =
            meter(ledger.clone(), clock.clone(), ReplicaId::generate(), MeterOptions::default());
        let provider = Provider {
            kind: ProviderKind::Openai,
            base_url: "https://example.com/v1".parse().unwrap(),
            auth: None,
            allow_private: false,
        };
        let routes = [("first", 1), ("second", 3)].map(|(name, price)| {
            let target = Target {
                provider: name.parse().unwrap(),
                model: format!("{name}-model"),
                price: TokenPrice::flat(usd(price), usd(0)),
                stream_usage: true,
                weight: None,
            };
            Arc::new(Route::new("acme", &Model::default(), target, &provider, None))
        });
        let call_of = ModelCall { model: "small".parse().unwrap(), provider: None, upstream_model: None };
        let start = Start {
            workspace_id: "acme".parse().unwrap(),
            principal: Principal::Key("k1".parse().unwrap()),
            revision: Revision { epoch: 1, number: 7 },
            kind: UsageKind::ChatCompletion(call_of),
            price: Price::Tokens(routes[0].target.price.clone()),
            request_id: RequestId::new(),
            idempotency: None,
        };
        let (guard, _) = meter.admit(start, Terms::default()).await.unwrap();
        let body = br#"{"model":"small","messages":[{"role":"user","content":"one"}]}"#;
        let request = LlmRequest::parse(Endpoint::ChatCompletions, Bytes::from_static(body)).unwrap();
        let most = Most { input: 10, output: 10 };
        let mut bill = Bill::new(guard, &request, clock, most, None);
        call(&mut bill, routes).await;
        drop(bill);
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        flusher.run(shutdown, CancellationToken::new()).await;
        ledger.events()
    }

    fn failure() -> LlmError {
        LlmError::NoTarget
    }

    fn provider(event: &UsageEvent) -> Option<&str> {
        event.kind.model_call()?.provider.as_ref().map(obol_model::ProviderName::as_str)
    }

    fn of_request(events: &[UsageEvent]) -> &UsageEvent {
        events.iter().find(|event| event.event_id.part == EventPart::Request).unwrap()
    }

    #[tokio::test]
    async fn a_call_that_was_sent_and_abandoned_costs_its_prompt_at_the_target_it_went_to() {
        let all = events(async |bill, [first, second]| {
            bill.afford(&first).await.unwrap();
            bill.failed(&first, &failure(), false);
            bill.afford(&second).await.unwrap();
        })
        .await;
        let event = of_request(&all);
        assert_eq!(provider(event), Some("second"));
        assert_eq!(event.kind.model_call().unwrap().upstream_model.as_deref(), Some("second-model"));
        let input = event.tokens.input;
        assert!(input > 0 && event.estimated);
        assert_eq!((event.outcome, event.cost), (Outcome::Partial, NanoUsd::new(input * 3_000).into()));
    }

    #[tokio::test]
    async fn a_call_that_was_not_sent_or_was_refused_costs_nothing() {
        let nothing = |event: &UsageEvent| {
            assert_eq!(
                (event.tokens, event.estimated, event.cost),
                (Tokens::default(), false, NanoUsd::ZERO.into())
            );
        };
        nothing(of_request(&events(async |_, _| ()).await));
        let refused = events(async |bill, [first, _]| {
            bill.afford(&first).await.unwrap();
            bill.failed(&first, &failure(), false);
        });
        nothing(of_request(&refused.await));
    }

    #[tokio::test]
    async fn the_last_target_that_may_have_worked_is_due_and_one_that_refused_changes_nothing() {
        let all = events(async |bill, [first, second]| {
            bill.afford(&first).await.unwrap();
            bill.failed(&first, &failure(), true);
            bill.afford(&second).await.unwrap();
            bill.failed(&second, &failure(), false);
        })
        .await;
        let event = of_request(&all);
        assert_eq!(provider(event), Some("first"));
        assert_eq!(event.cost, NanoUsd::new(event.tokens.input * 1_000).into());
    }

    #[tokio::test]
    async fn the_caller_pays_for_the_target_that_answered_and_every_attempt_is_noted() {
        let all = events(async |bill, [first, second]| {
            bill.afford(&first).await.unwrap();
            bill.failed(&first, &failure(), true);
            bill.afford(&second).await.unwrap();
            bill.answered(&second, None).await;
            let tokens = Tokens { input: 7, ..Tokens::default() };
            bill.used(Usage { tokens, estimated: false });
        })
        .await;
        let event = of_request(&all);
        assert_eq!((provider(event), event.cost), (Some("second"), NanoUsd::new(7 * 3_000).into()));
        let attempts: Vec<_> =
            all.iter().filter(|event| event.event_id.part != EventPart::Request).map(provider).collect();
        assert_eq!(attempts, [Some("first"), Some("second")]);
    }
}
