//! What clients check in the items of lists. Their SDKs reject a whole list because of one item that has a member of
//! another type than the schema says, so such an item is left out of the list (DESIGN §9.1). Pure.
//!
//! Only what the SDKs check is here: members that are unknown, now or in a later revision, are passed on unseen.

use serde_json::value::RawValue;

use crate::pool::ListKind;
use crate::wire::{self, Object};

/// What a value has to be.
enum Shape {
    Text,
    Number,
    Flag,
    /// An object with anything in it.
    Map,
    /// An object whose named members, where they are present, have these shapes; `true` marks those that must be present.
    Members(&'static [(&'static str, bool, Shape)]),
    /// An array of these.
    List(&'static Shape),
    /// This very text.
    Word(&'static str),
}

const SCHEMA: Shape = Shape::Members(&[
    ("type", true, Shape::Word("object")),
    ("properties", false, Shape::Map),
    ("required", false, Shape::List(&Shape::Text)),
]);

const ICONS: Shape = Shape::List(&Shape::Members(&[
    ("src", true, Shape::Text),
    ("mimeType", false, Shape::Text),
    ("sizes", false, Shape::List(&Shape::Text)),
]));

const TOOL: Shape = Shape::Members(&[
    ("name", true, Shape::Text),
    ("title", false, Shape::Text),
    ("description", false, Shape::Text),
    ("inputSchema", true, SCHEMA),
    ("outputSchema", false, SCHEMA),
    (
        "annotations",
        false,
        Shape::Members(&[
            ("title", false, Shape::Text),
            ("readOnlyHint", false, Shape::Flag),
            ("destructiveHint", false, Shape::Flag),
            ("idempotentHint", false, Shape::Flag),
            ("openWorldHint", false, Shape::Flag),
        ]),
    ),
    ("icons", false, ICONS),
    ("execution", false, Shape::Members(&[("taskSupport", false, Shape::Text)])),
    ("_meta", false, Shape::Map),
]);

const ANNOTATIONS: Shape = Shape::Members(&[
    ("audience", false, Shape::List(&Shape::Text)),
    ("priority", false, Shape::Number),
    ("lastModified", false, Shape::Text),
]);

const RESOURCE: Shape = Shape::Members(&[
    ("uri", true, Shape::Text),
    ("name", true, Shape::Text),
    ("title", false, Shape::Text),
    ("description", false, Shape::Text),
    ("mimeType", false, Shape::Text),
    ("size", false, Shape::Number),
    ("annotations", false, ANNOTATIONS),
    ("icons", false, ICONS),
    ("_meta", false, Shape::Map),
]);

const TEMPLATE: Shape = Shape::Members(&[
    ("uriTemplate", true, Shape::Text),
    ("name", true, Shape::Text),
    ("title", false, Shape::Text),
    ("description", false, Shape::Text),
    ("mimeType", false, Shape::Text),
    ("annotations", false, ANNOTATIONS),
    ("icons", false, ICONS),
    ("_meta", false, Shape::Map),
]);

const PROMPT: Shape = Shape::Members(&[
    ("name", true, Shape::Text),
    ("title", false, Shape::Text),
    ("description", false, Shape::Text),
    (
        "arguments",
        false,
        Shape::List(&Shape::Members(&[
            ("name", true, Shape::Text),
            ("title", false, Shape::Text),
            ("description", false, Shape::Text),
            ("required", false, Shape::Flag),
        ])),
    ),
    ("icons", false, ICONS),
    ("_meta", false, Shape::Map),
]);

/// Checks one item of a list.
///
/// # Errors
/// The path of the first member that clients would stumble over, such as `inputSchema.required`.
pub(crate) fn check(kind: ListKind, item: &RawValue) -> Result<(), String> {
    let shape = match kind {
        ListKind::Tools => &TOOL,
        ListKind::Resources => &RESOURCE,
        ListKind::ResourceTemplates => &TEMPLATE,
        ListKind::Prompts => &PROMPT,
    };
    fits(shape, item, "")
}

fn fits(shape: &Shape, value: &RawValue, path: &str) -> Result<(), String> {
    let first = value.get().bytes().next().unwrap_or(b' ');
    let wrong = || {
        Err(if path.is_empty() {
            "it is no object, or names a key twice".to_owned()
        } else {
            path.to_owned()
        })
    };
    match shape {
        Shape::Text if first == b'"' => Ok(()),
        Shape::Number if first == b'-' || first.is_ascii_digit() => Ok(()),
        Shape::Flag if first == b't' || first == b'f' => Ok(()),
        Shape::Map if first == b'{' => Ok(()),
        Shape::Word(word) if wire::string(value).as_deref() == Some(*word) => Ok(()),
        Shape::List(of) => match wire::array(value) {
            Some(items) => items.into_iter().try_for_each(|item| fits(of, item, path)),
            None => wrong(),
        },
        Shape::Members(members) => {
            let Ok(object) = Object::parse(value.get()) else { return wrong() };
            for (name, required, shape) in *members {
                let path = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
                match object.get(name) {
                    Some(member) => fits(shape, member, &path)?,
                    None if *required => return Err(path),
                    None => {}
                }
            }
            Ok(())
        }
        _ => wrong(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(kind: ListKind, text: &str) -> Result<(), String> {
        check(kind, &RawValue::from_string(text.to_owned()).unwrap())
    }

    #[test]
    fn items_as_servers_write_them_pass_and_unknown_members_are_not_looked_at() {
        for (kind, text) in [
            (
                ListKind::Tools,
                r#"{"name":"a","inputSchema":{"type":"object","$defs":5},"x":{"y":[1]},"annotations":{"x":1}}"#,
            ),
            (
                ListKind::Resources,
                r#"{"uri":"a:","name":"a","size":5,"annotations":{"audience":["user"],"priority":0.5}}"#,
            ),
            (ListKind::ResourceTemplates, r#"{"uriTemplate":"a:{b}","name":"a","mimeType":"text/plain"}"#),
            (
                ListKind::Prompts,
                r#"{"name":"a","arguments":[{"name":"b","required":true}],"icons":[{"src":"data:","sizes":["1x1"]}]}"#,
            ),
        ] {
            assert_eq!(checked(kind, text), Ok(()), "{text}");
        }
    }

    #[test]
    fn what_an_sdk_would_reject_is_named() {
        let tool = |rest: &str| format!(r#"{{"name":"a","inputSchema":{{"type":"object"}},{rest}}}"#);
        let cases = [
            (ListKind::Tools, "5".to_owned(), "it is no object, or names a key twice"),
            (ListKind::Tools, r#"{"inputSchema":{"type":"object"}}"#.to_owned(), "name"),
            (ListKind::Tools, r#"{"name":"a"}"#.to_owned(), "inputSchema"),
            (
                ListKind::Tools,
                r#"{"name":"a","inputSchema":{"type":"string"}}"#.to_owned(),
                "inputSchema.type",
            ),
            (
                ListKind::Tools,
                r#"{"name":"a","inputSchema":{"type":"object","required":"x"}}"#.to_owned(),
                "inputSchema.required",
            ),
            (
                ListKind::Tools,
                r#"{"name":"a","inputSchema":{"type":"object","properties":5}}"#.to_owned(),
                "inputSchema.properties",
            ),
            (ListKind::Tools, tool(r#""title":5"#), "title"),
            (ListKind::Tools, tool(r#""description":null"#), "description"),
            (ListKind::Tools, tool(r#""annotations":"x""#), "annotations"),
            (ListKind::Tools, tool(r#""annotations":{"readOnlyHint":"yes"}"#), "annotations.readOnlyHint"),
            (ListKind::Tools, tool(r#""icons":"x""#), "icons"),
            (ListKind::Tools, tool(r#""icons":[{"mimeType":"image/png"}]"#), "icons.src"),
            (ListKind::Tools, tool(r#""_meta":5"#), "_meta"),
            (ListKind::Tools, tool(r#""execution":5"#), "execution"),
            (ListKind::Tools, tool(r#""outputSchema":{"type":"array"}"#), "outputSchema.type"),
            (ListKind::Resources, r#"{"uri":"a:","name":"a","mimeType":5}"#.to_owned(), "mimeType"),
            (ListKind::Resources, r#"{"uri":"a:"}"#.to_owned(), "name"),
            (ListKind::Prompts, r#"{"name":"a","arguments":5}"#.to_owned(), "arguments"),
            (
                ListKind::Prompts,
                r#"{"name":"a","arguments":[{"required":true}]}"#.to_owned(),
                "arguments.name",
            ),
        ];
        for (kind, text, path) in cases {
            assert_eq!(checked(kind, &text), Err(path.to_owned()), "{text}");
        }
    }
}
