//! MCP as Obol speaks it: [`wire`] (messages, splicing, server-sent events, versions: pure), [`names`] (how names and
//! URIs of many servers appear as those of one: pure), [`pool`] (upstream connections and the `Transport` trait) and
//! [`catalogue`] (what each upstream offers, listed once and kept).
//!
//! The gateway is a middlebox: it reads the envelope, the method, the name and `_meta`, and passes the rest on as the
//! bytes that it got (DESIGN §9.1). Nothing here models the whole of MCP, and nothing here knows HTTP status codes
//! toward clients, policies or sessions.

pub mod catalogue;
pub mod names;
pub mod pool;
mod shape;
pub mod wire;
