use redis::Cmd;

/// A Lua script of some crate: a file of its own with a version in its name (DESIGN §5).
#[derive(Debug)]
pub struct Script {
    name: &'static str,
    source: &'static str,
    sha: String,
}

impl Script {
    /// A script; `name` is that of its file and says which one failed.
    pub fn new(name: &'static str, source: &'static str) -> Self {
        let sha = redis::Script::new(source).get_hash().to_owned();
        Self { name, source, sha }
    }

    /// The name, for logs.
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn call(&self, keys: &[&str], args: &[&[u8]]) -> Cmd {
        with_arguments("EVALSHA", &self.sha, keys, args)
    }

    /// With its text, for a server that does not know it.
    pub(crate) fn call_in_full(&self, keys: &[&str], args: &[&[u8]]) -> Cmd {
        with_arguments("EVAL", self.source, keys, args)
    }
}

/// Keys and arguments of one call of a script.
#[derive(Debug, Clone, Default)]
pub struct ScriptCall {
    /// All keys that it uses; on a Cluster they lie in one slot.
    pub keys: Vec<String>,
    /// The arguments.
    pub args: Vec<Vec<u8>>,
}

impl ScriptCall {
    pub(crate) fn of(&self, script: &Script) -> Cmd {
        self.with(|keys, args| script.call(keys, args))
    }

    pub(crate) fn in_full(&self, script: &Script) -> Cmd {
        self.with(|keys, args| script.call_in_full(keys, args))
    }

    fn with(&self, make: impl FnOnce(&[&str], &[&[u8]]) -> Cmd) -> Cmd {
        let keys: Vec<&str> = self.keys.iter().map(String::as_str).collect();
        let args: Vec<&[u8]> = self.args.iter().map(Vec::as_slice).collect();
        make(&keys, &args)
    }
}

fn with_arguments(name: &str, script: &str, keys: &[&str], args: &[&[u8]]) -> Cmd {
    let mut cmd = redis::cmd(name);
    cmd.arg(script).arg(keys.len());
    for key in keys {
        cmd.arg(*key);
    }
    for arg in args {
        cmd.arg(*arg);
    }
    cmd
}
