//! Everything HTTP: the router and the order of its layers, the extractors, the endpoints of MCP (`/mcp`), of the LLM
//! surface (`/v1`) and of operations, and the only place that turns error kinds into HTTP statuses, JSON-RPC errors and
//! OpenAI error objects.
//!
//! Handlers are thin: extract, call a capability, map the result. This crate reads no environment, opens no Redis and
//! decides no policy; everything it needs is handed to [`Gateway`].

mod activity;
mod compiled;
mod failure;
mod front;
mod gateway;
mod llm;
mod mcp;
mod ops;
mod origin;
mod serve;

pub use compiled::{CompileWorkspace, Compiled};
pub use gateway::{EdgeOptions, Gateway, GatewayParts};
pub use ops::{Redis as RedisProbe, ReloadVerifier};
pub use origin::OriginPolicy;
pub use serve::{Listeners, ServeOptions, serve};
