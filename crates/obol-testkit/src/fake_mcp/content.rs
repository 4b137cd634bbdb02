//! What the fake server offers, as raw JSON.

use std::fmt::Write as _;

use crate::answer::quoted;

pub(super) const CAPABILITIES: &str = r#"{"tools":{"listChanged":true},"resources":{"subscribe":true,"listChanged":true},"prompts":{"listChanged":true},"completions":{},"logging":{}}"#;

pub(super) const TOOLS: [&str; 5] = [
    r#"{"name":"echo","title":"Echo","description":"Returns its arguments as text","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}}"#,
    r#"{"name":"raw","description":"Returns what the test prepared","inputSchema":{"type":"object"}}"#,
    r#"{"name":"slow","description":"Waits before it answers","inputSchema":{"type":"object","properties":{"ms":{"type":"integer","minimum":0}},"required":["ms"]}}"#,
    r#"{"name":"counter","description":"Counts its calls in this session","inputSchema":{"type":"object"}}"#,
    r#"{"name":"destroy","description":"Would delete something","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":false,"destructiveHint":true}}"#,
];

pub(super) const RESOURCES: &str = r#"{"resources":[{"uri":"demo://text","name":"text","description":"A static text","mimeType":"text/plain"}]}"#;

pub(super) const TEMPLATES: &str = r#"{"resourceTemplates":[{"uriTemplate":"demo://item/{id}","name":"item","description":"An item by its id","mimeType":"text/plain"}]}"#;

pub(super) const PROMPTS: &str = r#"{"prompts":[{"name":"greet","description":"Greets someone","arguments":[{"name":"name","description":"Whom to greet","required":true}]}]}"#;

pub(super) const TOOLS_CHANGED: &str = r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;

/// What `raw` returns until a test says otherwise.
pub(super) const RAW_RESULT: &str = r#"{"content":[{"type":"text","text":"raw"}]}"#;

pub(super) fn resource_updated(uri: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/resources/updated","params":{{"uri":{}}}}}"#,
        quoted(uri)
    )
}

/// A tool result of one text.
pub(super) fn text_result(text: &str) -> String {
    format!(r#"{{"content":[{{"type":"text","text":{}}}]}}"#, quoted(text))
}

/// The contents of a resource, if there is one.
pub(super) fn read(uri: &str) -> Option<String> {
    let text = match uri.strip_prefix("demo://item/") {
        Some(id) if !id.is_empty() => format!("item {id}"),
        _ if uri == "demo://text" => "a static text".to_owned(),
        _ => return None,
    };
    Some(format!(
        r#"{{"contents":[{{"uri":{},"mimeType":"text/plain","text":{}}}]}}"#,
        quoted(uri),
        quoted(&text)
    ))
}

pub(super) fn greeting(name: &str) -> String {
    format!(
        r#"{{"description":"A greeting","messages":[{{"role":"user","content":{{"type":"text","text":{}}}}}]}}"#,
        quoted(&format!("Please greet {name}."))
    )
}

pub(super) fn completion(value: &str) -> String {
    let (one, two) = (quoted(&format!("{value}-one")), quoted(&format!("{value}-two")));
    format!(r#"{{"completion":{{"values":[{one},{two}],"total":2,"hasMore":false}}}}"#)
}

pub(super) fn progress(token: &str, done: u32, total: u32) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{done},"total":{total}}}}}"#
    )
}

pub(super) fn log(number: u32) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","logger":"fake","data":"log {number}"}}}}"#
    )
}

/// The `tools/list` results, one per page; the cursor of a page is its number.
pub(super) fn pages(tools: &[String], page_size: Option<usize>) -> Vec<String> {
    let chunks: Vec<&[String]> = match page_size {
        Some(size) if !tools.is_empty() => tools.chunks(size.max(1)).collect(),
        _ => vec![tools],
    };
    let last = chunks.len() - 1;
    let page = |(number, chunk): (usize, &&[String])| {
        let mut page = format!(r#"{{"tools":[{}]"#, chunk.join(","));
        if number < last {
            write!(page, r#","nextCursor":"{}""#, number + 1).expect("writing to a string");
        }
        page.push('}');
        page
    };
    chunks.iter().enumerate().map(page).collect()
}
