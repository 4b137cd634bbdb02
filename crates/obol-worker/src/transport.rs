use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use nix::unistd::Pid;
use obol_mcp::pool::{Inbound, Outgoing, Reply, Spawn, Transport, TransportError};
use obol_model::Secret;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::WorkerOptions;
use crate::child::{self, Signals};
use crate::frames::{Frames, Line};
use crate::route::{Registered, Routes};
use crate::stderr::{self, Tail};

/// A message on its way into stdin, with its share of the queue's bytes.
type Queued = (Bytes, OwnedSemaphorePermit);

/// One child.
#[derive(Debug)]
pub(crate) struct StdioTransport {
    name: String,
    stdin: mpsc::Sender<Queued>,
    queued_bytes: Arc<Semaphore>,
    routes: Arc<Routes>,
    signals: Arc<Signals>,
    write_timeout: Duration,
}

impl StdioTransport {
    /// Takes a child over; `None` when it has no pipes or has no id, which a fresh child always has.
    pub(crate) fn start(
        mut child: Child,
        name: String,
        secrets: Vec<Secret<String>>,
        options: WorkerOptions,
        spawner: &Arc<dyn Spawn>,
    ) -> Option<Arc<Self>> {
        let pid = Pid::from_raw(child.id()?.try_into().ok()?);
        let (stdin, stdout, stderr) = (child.stdin.take()?, child.stdout.take()?, child.stderr.take()?);
        let (routes, unsolicited) = Routes::new(options.max_calls);
        let (queue, queued) = mpsc::channel(options.max_queued);
        let (signals, tail) = (Signals::new(), Arc::new(Tail::default()));
        let transport = Arc::new(Self {
            name: name.clone(),
            stdin: queue,
            queued_bytes: Arc::new(Semaphore::new(options.max_queued_bytes as usize)),
            routes: Arc::clone(&routes),
            signals: Arc::clone(&signals),
            write_timeout: options.write_timeout,
        });

        let until = Arc::clone(&signals);
        spawner.spawn("worker_stdin", Box::pin(async move { write(stdin, queued, &until).await }));

        let frames = Frames::new(options.max_message);
        let reader = Reader { name: name.clone(), routes, unsolicited, frames, skips_answer: false };
        let until = Arc::clone(&signals);
        spawner.spawn("worker_stdout", Box::pin(async move { reader.run(stdout, &until).await }));

        let (until, kept, of) = (Arc::clone(&signals), Arc::clone(&tail), name.clone());
        let drain = async move {
            tokio::select! {
                () = stderr::drain(stderr, &of, &secrets, &kept) => {}
                () = until.pipes.cancelled() => {}
            }
            until.stderr_ended.cancel();
        };
        spawner.spawn("worker_stderr", Box::pin(drain));

        spawner.spawn("worker", Box::pin(child::own(child, pid, name, signals, tail, options)));
        Some(transport)
    }

    /// Puts a message into the queue. Whatever fails here was not sent.
    async fn enqueue(&self, mut message: Bytes) -> Result<(), TransportError> {
        let size = u32::try_from(message.len()).unwrap_or(u32::MAX);
        if message.contains(&b'\n') {
            message = on_one_line(&message);
        }
        let put = async {
            let gone = TransportError::Unsent("its process has ended");
            let permit =
                Arc::clone(&self.queued_bytes).acquire_many_owned(size).await.map_err(|_| gone.clone())?;
            self.stdin.send((message, permit)).await.map_err(|_| gone)
        };
        tokio::select! {
            put = tokio::time::timeout(self.write_timeout, put) => {
                put.unwrap_or(Err(TransportError::Unsent("its process does not read what it is sent")))
            }
            () = self.signals.stdin.cancelled() => Err(TransportError::Unsent("its process has ended")),
        }
    }
}

/// JSON has line breaks only between tokens, where a space is as good (transports, "stdio": no embedded newlines).
fn on_one_line(message: &[u8]) -> Bytes {
    message.iter().map(|b| if matches!(b, b'\n' | b'\r') { b' ' } else { *b }).collect::<Vec<u8>>().into()
}

async fn write(mut stdin: ChildStdin, mut queued: mpsc::Receiver<Queued>, signals: &Signals) {
    let pump = async {
        while let Some((message, _permit)) = queued.recv().await {
            let written = async {
                stdin.write_all(&message).await?;
                stdin.write_all(b"\n").await?;
                stdin.flush().await
            };
            if let Err(e) = written.await {
                tracing::debug!(error = %e, "worker stdin broke");
                return;
            }
        }
    };
    tokio::select! {
        () = pump => {}
        () = signals.stdin.cancelled() => {}
    }
    // Whoever waits for a place in the queue learns that there is none; dropping `stdin` closes the pipe.
    signals.stdin.cancel();
}

struct Reader {
    name: String,
    routes: Arc<Routes>,
    unsolicited: mpsc::Sender<Bytes>,
    frames: Frames,
    /// The line that is being skipped may be an answer.
    skips_answer: bool,
}

impl Reader {
    async fn run(mut self, mut stdout: ChildStdout, signals: &Signals) {
        tokio::select! {
            () = self.read(&mut stdout) => {}
            () = signals.pipes.cancelled() => {}
        }
        self.routes.end();
        signals.stdout_ended.cancel();
    }

    async fn read(&mut self, stdout: &mut ChildStdout) {
        let mut skipped = 0_u64;
        loop {
            while let Some(line) = self.frames.next() {
                let understood = match &line {
                    Line::Message(line) => self.routes.route(line, &self.unsolicited),
                    Line::TooLong(head) => {
                        self.skips_answer = self.routes.too_long(head);
                        false
                    }
                    Line::LongEnd(end) => {
                        if std::mem::take(&mut self.skips_answer) {
                            self.routes.long_end(end);
                        }
                        true
                    }
                    Line::Noise(_) => false,
                };
                if !understood {
                    skipped += 1;
                    // At each power of two: a chatty server must not flood the log.
                    if skipped.is_power_of_two() {
                        let too_long = matches!(line, Line::TooLong(_));
                        tracing::warn!(
                            worker = self.name,
                            skipped,
                            too_long,
                            "worker wrote no message to stdout"
                        );
                    }
                }
            }
            self.frames.buffer.reserve(16 * 1024);
            match stdout.read_buf(&mut self.frames.buffer).await {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) => {
                    tracing::debug!(worker = self.name, error = %e, "worker stdout broke");
                    return;
                }
            }
        }
    }
}

/// The messages of one call.
struct Answers(Registered);

#[async_trait]
impl Inbound for Answers {
    async fn next(&mut self) -> Result<Option<Bytes>, TransportError> {
        match self.0.messages.recv().await {
            Some(message) => message.map(Some),
            None => Err(TransportError::Broken("its process has ended")),
        }
    }
}

/// The messages of no call.
struct Unsolicited(mpsc::Receiver<Bytes>);

#[async_trait]
impl Inbound for Unsolicited {
    async fn next(&mut self) -> Result<Option<Bytes>, TransportError> {
        Ok(self.0.recv().await)
    }
}

#[async_trait]
impl Transport for StdioTransport {
    fn name(&self) -> &'static str {
        "stdio"
    }

    fn request(self: Arc<Self>, outgoing: Outgoing) -> BoxFuture<'static, Result<Reply, TransportError>> {
        Box::pin(async move {
            let registered = self.routes.register(outgoing.id)?;
            self.enqueue(outgoing.message).await?;
            Ok(Reply::Stream(Box::new(Answers(registered))))
        })
    }

    async fn send(&self, message: Bytes) -> Result<(), TransportError> {
        self.enqueue(message).await
    }

    async fn unsolicited(self: Arc<Self>) -> Result<Option<Box<dyn Inbound>>, TransportError> {
        Ok(self.routes.take_unsolicited().map(|r| Box::new(Unsolicited(r)) as Box<dyn Inbound>))
    }

    fn is_durable(&self) -> bool {
        true
    }

    fn negotiated(&self, _version: &str) {}

    fn is_closed(&self) -> bool {
        self.signals.stdin.is_cancelled()
    }

    async fn close(&self, within: Duration) {
        self.signals.close.send_if_modified(|close| {
            let first = close.is_none();
            *close = close.or(Some(within));
            first
        });
        // The owner keeps the bound; this one is for an owner that was aborted.
        let bound = within + Duration::from_secs(5);
        if tokio::time::timeout(bound, self.signals.gone.cancelled()).await.is_err() {
            tracing::warn!(worker = self.name, "worker did not end in time");
        }
    }
}
