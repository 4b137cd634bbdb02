//! A ticket desk as an MCP server over Streamable HTTP.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use obol_testkit::Failure;
use parking_lot::Mutex;
use rmcp::handler::server::router::prompt::PromptRouter;
use rmcp::handler::server::router::tool::ToolRouter;
use rmcp::handler::server::wrapper::{Json, Parameters};
use rmcp::model::{
    CallToolResult, ContentBlock, Implementation, ListResourceTemplatesResult, ListResourcesResult,
    PaginatedRequestParams, ProgressNotificationParam, PromptMessage, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, Resource, ResourceContents, ResourceTemplate, Role,
    ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{
    ErrorData, RoleServer, ServerHandler, prompt, prompt_handler, prompt_router, tool, tool_handler,
    tool_router,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::listen;

/// How long one step of a report takes: long enough to see progress arrive, short enough to wait for.
const STEP: Duration = Duration::from_millis(300);

pub(crate) async fn run(listen: SocketAddr) -> Result<ExitCode, Failure> {
    // One desk for all sessions: a ticket that one client closed is closed for the next.
    let tickets = Arc::new(Mutex::new(Ticket::all()));
    let service = StreamableHttpService::new(
        move || Ok(Desk::new(tickets.clone())),
        Arc::new(LocalSessionManager::default()),
        StreamableHttpServerConfig::default(),
    );
    listen::serve("mcp", listen, "/mcp", axum::Router::new().nest_service("/mcp", service)).await
}

/// A support ticket.
#[derive(Debug, Clone, Serialize, JsonSchema)]
struct Ticket {
    /// Its number.
    id: u32,
    /// What it is about.
    title: String,
    /// Who asked.
    customer: String,
    /// Whether somebody still has to act.
    status: Status,
    /// How soon.
    priority: Priority,
    /// What was said so far.
    notes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Status {
    Open,
    Closed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Priority {
    Low,
    Normal,
    Urgent,
}

impl Ticket {
    fn all() -> Vec<Self> {
        use Priority::{Low, Normal, Urgent};
        use Status::{Closed, Open};
        [
            (
                101,
                "Invoices are sent twice",
                "Harbour Bakery",
                Open,
                Urgent,
                "Since Monday, every invoice of the north branch.",
            ),
            (
                102,
                "Cannot reset the password",
                "Lindqvist & Sons",
                Open,
                Normal,
                "The mail never arrives; not in spam either.",
            ),
            (
                103,
                "Export misses the last column",
                "Quarry Labs",
                Open,
                Normal,
                "Only for files above 10,000 rows.",
            ),
            (104, "Typo on the pricing page", "Harbour Bakery", Closed, Low, "Fixed with the last release."),
            (
                105,
                "Sign-in is slow in the morning",
                "Tern Logistics",
                Open,
                Urgent,
                "About eight seconds between seven and nine.",
            ),
            (106, "Please add dark mode", "Quarry Labs", Open, Low, "Asked for the third time."),
        ]
        .into_iter()
        .map(|(id, title, customer, status, priority, note)| Self {
            id,
            title: title.to_owned(),
            customer: customer.to_owned(),
            status,
            priority,
            notes: vec![note.to_owned()],
        })
        .collect()
    }

    fn uri(&self) -> String {
        format!("ticket://{}", self.id)
    }

    fn mentions(&self, words: &str) -> bool {
        let text = format!("{} {} {}", self.title, self.customer, self.notes.join(" ")).to_lowercase();
        words.to_lowercase().split_whitespace().all(|word| text.contains(word))
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Search {
    /// Words that must all occur; without any, every ticket is found.
    #[serde(default)]
    query: String,
    /// Only tickets with this status.
    status: Option<Status>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Found {
    /// How many there are.
    count: usize,
    /// The tickets, by number.
    tickets: Vec<Ticket>,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Which {
    /// The ticket's number.
    id: u32,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Close {
    /// The ticket's number.
    id: u32,
    /// What came of it; noted on the ticket.
    resolution: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Export {
    /// How many steps the report takes, each about a third of a second; at most 100.
    #[serde(default = "Export::default_steps")]
    steps: u32,
}

impl Export {
    fn default_steps() -> u32 {
        5
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Triage {
    /// The ticket's number.
    ticket: String,
}

#[derive(Debug, Clone)]
struct Desk {
    tickets: Arc<Mutex<Vec<Ticket>>>,
    tool_router: ToolRouter<Self>,
    prompt_router: PromptRouter<Self>,
}

impl Desk {
    fn new(tickets: Arc<Mutex<Vec<Ticket>>>) -> Self {
        Self { tickets, tool_router: Self::tool_router(), prompt_router: Self::prompt_router() }
    }

    fn ticket(&self, id: u32) -> Option<Ticket> {
        self.tickets.lock().iter().find(|ticket| ticket.id == id).cloned()
    }
}

fn unknown(id: u32) -> String {
    format!("There is no ticket {id}. `search_tickets` lists those that exist.")
}

#[tool_router]
impl Desk {
    /// Finds tickets by words and status.
    #[tool(annotations(title = "Search tickets", read_only_hint = true, open_world_hint = false))]
    async fn search_tickets(&self, Parameters(search): Parameters<Search>) -> Json<Found> {
        let tickets: Vec<Ticket> = self
            .tickets
            .lock()
            .iter()
            .filter(|ticket| search.status.is_none_or(|status| ticket.status == status))
            .filter(|ticket| ticket.mentions(&search.query))
            .cloned()
            .collect();
        Json(Found { count: tickets.len(), tickets })
    }

    /// Shows one ticket with its notes.
    #[tool(annotations(title = "Show a ticket", read_only_hint = true, open_world_hint = false))]
    async fn get_ticket(&self, Parameters(which): Parameters<Which>) -> Result<Json<Ticket>, String> {
        self.ticket(which.id).map(Json).ok_or_else(|| unknown(which.id))
    }

    /// Closes a ticket for good.
    #[tool(annotations(
        title = "Close a ticket",
        read_only_hint = false,
        destructive_hint = true,
        idempotent_hint = true
    ))]
    async fn close_ticket(&self, Parameters(close): Parameters<Close>) -> Result<CallToolResult, String> {
        let mut tickets = self.tickets.lock();
        let ticket =
            tickets.iter_mut().find(|ticket| ticket.id == close.id).ok_or_else(|| unknown(close.id))?;
        ticket.status = Status::Closed;
        ticket.notes.push(format!("Closed: {}", close.resolution));
        // A link and a text, so that a gateway has a URI to rewrite inside a result.
        let link =
            Resource::new(ticket.uri(), format!("ticket-{}", ticket.id)).with_title(ticket.title.clone());
        let text = format!("Ticket {} is closed: {}", ticket.id, close.resolution);
        Ok(CallToolResult::success(vec![ContentBlock::text(text), ContentBlock::resource_link(link)]))
    }

    /// Writes a report over all tickets; takes its time and tells how far it is.
    #[tool(annotations(title = "Export a report", read_only_hint = true, open_world_hint = false))]
    async fn export_report(
        &self,
        Parameters(export): Parameters<Export>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let steps = export.steps.clamp(1, 100);
        let token = context.meta.get_progress_token();
        for step in 1..=steps {
            tokio::select! {
                () = tokio::time::sleep(STEP) => {}
                () = context.ct.cancelled() => return Err(ErrorData::internal_error("the report was cancelled", None)),
            }
            if let Some(token) = &token {
                let progress = ProgressNotificationParam::new(token.clone(), f64::from(step))
                    .with_total(f64::from(steps))
                    .with_message(format!("step {step} of {steps}"));
                // A client that left is noticed by the cancellation above.
                context.peer.notify_progress(progress).await.ok();
            }
        }
        let tickets = self.tickets.lock();
        let open = tickets.iter().filter(|ticket| ticket.status == Status::Open).count();
        let lines: Vec<String> =
            tickets.iter().map(|t| format!("{},{:?},{:?},{}", t.id, t.status, t.priority, t.title)).collect();
        Ok(format!(
            "{} tickets, {open} open\nid,status,priority,title\n{}\n",
            tickets.len(),
            lines.join("\n")
        ))
    }
}

#[prompt_router]
impl Desk {
    /// Asks for a first assessment of a ticket.
    #[prompt(
        name = "triage",
        description = "A first assessment of a ticket: what it is, how urgent, who should act"
    )]
    async fn triage(&self, Parameters(triage): Parameters<Triage>) -> Result<Vec<PromptMessage>, ErrorData> {
        let id = triage.ticket.trim().parse().ok();
        let Some(ticket) = id.and_then(|id| self.ticket(id)) else {
            return Err(ErrorData::invalid_params(format!("there is no ticket `{}`", triage.ticket), None));
        };
        let text = format!(
            "Assess this support ticket in three sentences: what is wrong, how urgent it is, who should act next.\n\n\
             #{} {} ({}, {:?})\n{}",
            ticket.id,
            ticket.title,
            ticket.customer,
            ticket.priority,
            ticket.notes.join("\n")
        );
        Ok(vec![PromptMessage::new_text(Role::User, text)])
    }
}

#[tool_handler(router = self.tool_router)]
#[prompt_handler(router = self.prompt_router)]
impl ServerHandler for Desk {
    fn get_info(&self) -> ServerConfig {
        let capabilities =
            ServerCapabilities::builder().enable_tools().enable_resources().enable_prompts().build();
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("tickets", env!("CARGO_PKG_VERSION")))
            .with_instructions(
                "A small ticket desk. Search before you act; closing a ticket cannot be undone.",
            )
    }

    async fn list_resources(
        &self,
        _page: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let open = |ticket: &&Ticket| ticket.status == Status::Open;
        let resource = |ticket: &Ticket| {
            Resource::new(ticket.uri(), format!("ticket-{}", ticket.id))
                .with_title(ticket.title.clone())
                .with_mime_type("application/json")
        };
        Ok(ListResourcesResult::with_all_items(
            self.tickets.lock().iter().filter(open).map(resource).collect(),
        ))
    }

    async fn list_resource_templates(
        &self,
        _page: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let template = ResourceTemplate::new("ticket://{id}", "ticket")
            .with_description("Any ticket by its number, closed ones too")
            .with_mime_type("application/json");
        Ok(ListResourceTemplatesResult::with_all_items(vec![template]))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let id = request.uri.strip_prefix("ticket://").and_then(|id| id.parse().ok());
        let Some(ticket) = id.and_then(|id| self.ticket(id)) else {
            return Err(ErrorData::resource_not_found(format!("there is no `{}`", request.uri), None));
        };
        let text = serde_json::to_string_pretty(&ticket)
            .map_err(|why| ErrorData::internal_error(why.to_string(), None))?;
        let contents = ResourceContents::text(text, request.uri).with_mime_type("application/json");
        Ok(ReadResourceResult::new(vec![contents]).into())
    }
}
