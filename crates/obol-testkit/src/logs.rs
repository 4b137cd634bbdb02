//! Reading what processes wrote.

/// The lines of `text` that contain `needle`.
pub fn lines_with<'a>(text: &'a str, needle: &str) -> Vec<&'a str> {
    text.lines().filter(|line| line.contains(needle)).collect()
}

/// Asserts that none of `secrets` (what it is called, the secret) occurs in `text`.
///
/// # Panics
/// With the name of each secret found and the first line that has it. The secret itself is masked: the message ends
/// up in a log as well.
pub fn assert_no_secret(text: &str, secrets: &[(&str, &str)]) {
    let mut found = Vec::new();
    for (name, secret) in secrets {
        assert!(secret.len() >= 6, "`{name}` is too short to look for: it would be found by chance");
        if let Some(line) = text.lines().find(|line| line.contains(secret)) {
            found.push(format!("{name}: {}", line.replace(secret, "█████")));
        }
    }
    assert!(found.is_empty(), "secrets in the logs:\n{}", found.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clean_log_passes() {
        assert_no_secret("one\ntwo", &[("key", "obol_secret")]);
        assert_eq!(lines_with("a b\nb c\nd", "b"), ["a b", "b c"]);
    }

    #[test]
    #[should_panic(expected = "key: here is █████ in the open")]
    fn a_leak_is_named_and_masked() {
        assert_no_secret("fine\nhere is obol_secret in the open", &[("key", "obol_secret")]);
    }
}
