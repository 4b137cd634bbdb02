//! A desk drawer as an MCP server over stdio: dice, a clock, and notes that live as long as the process.

use std::process::ExitCode;
use std::sync::Arc;

use obol_testkit::Failure;
use parking_lot::Mutex;
use rand::RngExt as _;
use rmcp::handler::server::router::tool::ToolRouter;
use rmcp::handler::server::wrapper::{Json, Parameters};
use rmcp::model::{Implementation, ServerCapabilities, ServerConfig};
use rmcp::{ServerHandler, ServiceExt as _, tool, tool_handler, tool_router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) async fn run() -> Result<ExitCode, Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::new(format!("the stdio server ended: {why}"));
    let server = Drawer::new().serve(rmcp::transport::stdio()).await.map_err(|why| failed(&why))?;
    server.waiting().await.map_err(|why| failed(&why))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Roll {
    /// How many sides each die has; at least 2.
    #[serde(default = "Roll::default_sides")]
    sides: u32,
    /// How many dice, 1 to 100.
    #[serde(default = "Roll::default_count")]
    count: u32,
}

impl Roll {
    fn default_sides() -> u32 {
        6
    }

    fn default_count() -> u32 {
        1
    }
}

#[derive(Debug, Serialize, JsonSchema)]
struct Rolled {
    /// What each die shows.
    dice: Vec<u32>,
    /// All of it together.
    sum: u64,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Note {
    /// What to remember.
    text: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Notes {
    /// The notes, oldest first.
    notes: Vec<String>,
}

#[derive(Debug, Clone)]
struct Drawer {
    notes: Arc<Mutex<Vec<String>>>,
    tool_router: ToolRouter<Self>,
}

#[tool_router]
impl Drawer {
    fn new() -> Self {
        Self { notes: Arc::default(), tool_router: Self::tool_router() }
    }

    /// Rolls dice.
    #[tool(annotations(title = "Roll dice", read_only_hint = true, open_world_hint = false))]
    async fn roll_dice(&self, Parameters(roll): Parameters<Roll>) -> Result<Json<Rolled>, String> {
        if roll.sides < 2 || !(1..=100).contains(&roll.count) {
            return Err("A die has at least 2 sides, and 1 to 100 dice are rolled.".to_owned());
        }
        let mut random = rand::rng();
        let dice: Vec<u32> = (0..roll.count).map(|_| random.random_range(1..=roll.sides)).collect();
        let sum = dice.iter().map(|&die| u64::from(die)).sum();
        Ok(Json(Rolled { dice, sum }))
    }

    /// Tells the time (UTC).
    #[tool(annotations(title = "What time is it", read_only_hint = true, open_world_hint = false))]
    async fn now(&self) -> String {
        #[expect(clippy::disallowed_methods, reason = "telling the wall time is what this tool is for")]
        let now = jiff::Timestamp::now();
        format!("{now:.0}")
    }

    /// Remembers a note until this server ends.
    #[tool(annotations(
        title = "Add a note",
        read_only_hint = false,
        destructive_hint = false,
        open_world_hint = false
    ))]
    async fn notes_add(&self, Parameters(note): Parameters<Note>) -> String {
        let mut notes = self.notes.lock();
        notes.push(note.text);
        format!("Noted, as number {}.", notes.len())
    }

    /// Lists the notes.
    #[tool(annotations(title = "List the notes", read_only_hint = true, open_world_hint = false))]
    async fn notes_list(&self) -> Json<Notes> {
        Json(Notes { notes: self.notes.lock().clone() })
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Drawer {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("desk", env!("CARGO_PKG_VERSION")))
            .with_instructions("Dice, the time, and notes that are kept until this server ends.")
    }
}
