//! Waiting for a condition.

use std::fmt::Display;
use std::future::Future;
use std::panic::Location;
use std::time::Duration;

use tokio::time::Instant;

/// How often [`eventually`] asks. Short enough not to be felt, long enough to leave a two-core machine to the work.
const EVERY: Duration = Duration::from_millis(5);

/// What one try of [`eventually`] may answer: a `bool`, an `Option`, or a `Result` whose error says why not yet.
pub trait Attempt {
    /// What [`eventually`] returns in the end.
    type Output;

    /// The value, or the reason why it is not there yet.
    fn outcome(self) -> Result<Self::Output, String>;
}

impl Attempt for bool {
    type Output = ();

    fn outcome(self) -> Result<(), String> {
        if self { Ok(()) } else { Err("still false".to_owned()) }
    }
}

impl<T> Attempt for Option<T> {
    type Output = T;

    fn outcome(self) -> Result<T, String> {
        self.ok_or_else(|| "still nothing".to_owned())
    }
}

impl<T, E: Display> Attempt for Result<T, E> {
    type Output = T;

    fn outcome(self) -> Result<T, String> {
        self.map_err(|why| why.to_string())
    }
}

/// Tries until the answer is there and returns it.
///
/// A try that hangs is ended by the deadline too.
///
/// # Panics
/// When the deadline passes, with the last reason and the place of the call.
#[track_caller]
pub fn eventually<F, Fut>(
    deadline: Duration,
    mut attempt: F,
) -> impl Future<Output = <Fut::Output as Attempt>::Output>
where
    F: FnMut() -> Fut,
    Fut: Future,
    Fut::Output: Attempt,
{
    let asked_at = Location::caller();
    async move {
        let end = Instant::now() + deadline;
        let mut last = "no try finished".to_owned();
        loop {
            let Ok(answer) = tokio::time::timeout_at(end, attempt()).await else {
                panic!("not within {deadline:?} at {asked_at}: {last} (the last try hung)");
            };
            match answer.outcome() {
                Ok(value) => return value,
                Err(why) => last = why,
            }
            assert!(Instant::now() + EVERY < end, "not within {deadline:?} at {asked_at}: {last}");
            tokio::time::sleep(EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_answer_is_returned() {
        let mut tries = 0;
        let got = eventually(Duration::from_secs(5), || {
            tries += 1;
            std::future::ready(if tries == 3 { Ok(tries) } else { Err(format!("only {tries}")) })
        })
        .await;
        assert_eq!(got, 3);
    }

    #[tokio::test]
    #[should_panic(expected = "not within 30ms")]
    async fn the_deadline_panics_with_the_last_reason() {
        eventually(Duration::from_millis(30), || std::future::ready(Err::<(), _>("the lights are out")))
            .await;
    }

    #[tokio::test]
    #[should_panic(expected = "the last try hung")]
    async fn a_hanging_try_is_ended() {
        eventually(Duration::from_millis(30), std::future::pending::<bool>).await;
    }
}
