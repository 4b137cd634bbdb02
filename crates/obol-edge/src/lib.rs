//! Everything HTTP: the router and the order of its layers, the extractors, the endpoints of MCP (`/mcp`), of the LLM
//! surface (`/v1`) and of operations, and the only place that turns error kinds into HTTP statuses, JSON-RPC errors and
//! OpenAI error objects.
//!
//! Handlers are thin: extract, call a capability, map the result. This crate reads no environment, opens no Redis and
//! decides no policy; everything it needs is handed to [`Gateway`].

mod activity;
mod admin;
mod audit;
mod compiled;
mod control_api;
mod failure;
mod front;
mod gateway;
mod idempotency;
mod jwks;
mod llm;
mod mcp;
mod metadata;
mod ops;
mod origin;
mod patience;
mod peer;
mod serve;
mod service;
mod stamp;
mod toll;

pub use admin::AdminToken;
pub use compiled::{CompileWorkspace, Compiled};
pub use control_api::{ControlApi, ControlKnowledge};
pub use gateway::{EdgeOptions, Gateway, GatewayParts};
pub use mcp::spelling::spellings;
pub use ops::Redis as RedisProbe;
pub use origin::OriginPolicy;
pub use serve::{Listeners, ServeOptions, serve};
