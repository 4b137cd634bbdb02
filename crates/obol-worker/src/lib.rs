//! Child processes of stdio MCP servers, as a [`Transport`](obol_mcp::pool::Transport).
//!
//! Each upstream session of a stdio connection is one child in a process group of its own. The crate moves messages
//! between the pool and the child's stdio, and sees to it that nothing of the child stays behind: not the process, not
//! its group, not a zombie. A child that misbehaves (noise on stdout, floods of stderr, endless lines, not reading
//! its stdin, dying in mid-call, ignoring signals) harms its own calls only.
//!
//! It does not speak MCP (the pool does), restarts nothing and decides nothing about who shares a child.

mod child;
mod connect;
mod frames;
mod glance;
mod options;
mod route;
mod stderr;
mod transport;

pub use connect::StdioConnect;
pub use options::WorkerOptions;
