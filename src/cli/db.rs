//! `outboxd db`: init, migrate, schema, check, backup, prune, uninstall. They work on the file, beside a daemon or without.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::render::{self, Listing};
use super::{CliError, Exit};
use crate::domain::event::Millis;
use crate::store::migrate::{self, MigrateOptions, Migration};
use crate::store::retention::Class;
use crate::store::schema::Layout;
use crate::store::takeover::Plan;
use crate::store::upkeep::{self, Level};
use crate::store::{ddl, schema as tables};

/// `db init [--example]`: the only verb that creates a file. Running it again changes nothing.
pub fn init(path: &Path, source: &str, example: bool) -> Result<Exit, CliError> {
    let made = tables::init(path, source, example)?;
    let mut text = String::new();
    for note in &made.notes {
        text.push_str(&format!("{note}\n"));
    }
    text.push_str(&if made.tables {
        format!("{}: tables of outboxd made, schema version {}, source {}\n", path.display(), ddl::VERSION, made.source)
    } else {
        format!("{}: has the tables of outboxd already, source {}\n", path.display(), made.source)
    });
    if made.example {
        text.push_str("the example table assets was made\n");
    }
    render::text(&text)?;
    Ok(Exit::Ok)
}

/// `db migrate [--dry-run] [--failed hold] [--compat debezium]`.
pub fn migrate(path: &Path, options: &MigrateOptions, dry_run: bool, json: bool) -> Result<Exit, CliError> {
    let migration = if dry_run { migrate::examine(path, options)? } else { migrate::migrate(path, options)? };
    if json {
        render::json(&migration_json(&migration, dry_run))?;
    } else {
        render::text(&migration_text(&migration, dry_run))?;
    }
    Ok(Exit::Ok)
}

fn migration_text(migration: &Migration, dry_run: bool) -> String {
    let path = migration.path.display();
    let mut lines = Vec::new();
    match &migration.plan {
        Some(plan) if dry_run => lines.extend(plan_lines(&path.to_string(), plan)),
        None if dry_run => lines.push(match migration.from {
            Layout::Ours { version } if version < ddl::VERSION => {
                format!("{path}: schema version {version} would be brought to {}", ddl::VERSION)
            }
            _ => format!("{path}: up to date at schema version {}, nothing to do", ddl::VERSION),
        }),
        Some(_) | None if migration.done.is_empty() => {
            lines.push(format!("{path}: up to date at schema version {}, nothing to do", ddl::VERSION));
        }
        Some(_) | None => {
            lines.extend(migration.done.iter().map(|d| format!("{path}: {d}")));
            if let Some(locked) = migration.locked {
                lines.push(format!("the write lock was held for {}", render::span(locked.as_secs_f64())));
            }
        }
    }
    lines.extend(migration.plan.iter().flat_map(|p| p.warnings.iter().map(|w| format!("warning: {w}"))));
    lines.extend(migration.notes.iter().cloned());
    lines.join("\n") + "\n"
}

fn plan_lines(path: &str, plan: &Plan) -> Vec<String> {
    let mut lines = vec![
        format!(
            "{path}: a classic outbox with {} rows ({} pending, {} published, {} failed) in {}",
            plan.rows,
            plan.pending,
            plan.published,
            plan.failed,
            render::bytes(plan.file_bytes)
        ),
        "nothing was changed; without --dry-run it would be taken over in one transaction".into(),
    ];
    if let Some(estimate) = plan.estimate {
        lines.push(format!(
            "writers would wait for about {} (from a copy of some of the rows in memory; a slow disk adds to it)",
            render::span(estimate.as_secs_f64())
        ));
    }
    for (rows, what) in [
        (plan.held_aggregates, "aggregates have an old failed row before pending ones; --failed hold would hold them"),
        (
            plan.reordered_aggregates,
            "aggregates were not inserted in the order of their versions; seq will follow the versions",
        ),
        (plan.times_rewritten, "rows have a time in another form; it is rewritten as the same instant"),
        (plan.times_unreadable, "rows have a time that cannot be read; they are due at once"),
        (plan.withdrawn, "pending rows can never be published; they become failed, with the reason"),
        (plan.not_json, "rows have a payload that is not JSON; it is kept as it is"),
    ] {
        if rows > 0 {
            lines.push(format!("{rows} {what}"));
        }
    }
    const SHOWN: usize = 10;
    let shown = plan.odd.iter().take(SHOWN);
    lines.extend(shown.map(|(id, what)| format!("  row {}: {}", render::visible(id), render::visible(what))));
    if plan.odd.len() > SHOWN {
        lines.push("  --json names up to a hundred of them".into());
    }
    let around = &plan.dependents;
    lines.extend(
        around.indexes.iter().filter(|(n, _)| n != "idx_outbox_delivery").map(|(n, _)| format!("kept: index {n}")),
    );
    lines.extend(around.triggers.iter().map(|(n, _)| format!("kept: trigger {n}")));
    lines.extend(around.outer_triggers.iter().map(|(n, t)| format!("kept and tried: trigger {n} of {t}")));
    lines.extend(around.views.iter().map(|n| format!("kept and tried: view {n}")));
    lines
        .extend(around.references.iter().map(|r| format!("kept and tried: reference from {} ({})", r.table, r.column)));
    lines.extend(plan.extra_columns.iter().map(|c| format!("kept: column {c}")));
    lines
}

fn migration_json(migration: &Migration, dry_run: bool) -> Value {
    let plan = migration.plan.as_ref().map(|plan| {
        let names = |list: &[(String, String)]| list.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        json!({
            "rows": plan.rows, "pending": plan.pending, "published": plan.published, "failed": plan.failed,
            "file_bytes": plan.file_bytes, "held_aggregates": plan.held_aggregates,
            "reordered_aggregates": plan.reordered_aggregates, "times_rewritten": plan.times_rewritten,
            "times_unreadable": plan.times_unreadable, "withdrawn": plan.withdrawn, "not_json": plan.not_json,
            "odd": plan.odd.iter().map(|(id, what)| json!({"event_id": id, "what": what})).collect::<Vec<_>>(),
            "indexes": names(&plan.dependents.indexes), "triggers": names(&plan.dependents.triggers),
            "outer_triggers": names(&plan.dependents.outer_triggers), "views": plan.dependents.views,
            "references": plan.dependents.references.iter().map(|r| json!({"table": r.table, "column": r.column})).collect::<Vec<_>>(),
            "columns": plan.extra_columns, "warnings": plan.warnings,
            "estimated_seconds": plan.estimate.map(|e| e.as_secs_f64()),
        })
    });
    json!({
        "path": migration.path.display().to_string(), "dry_run": dry_run, "done": migration.done,
        "notes": migration.notes, "locked_seconds": migration.locked.map(|l| l.as_secs_f64()), "plan": plan,
    })
}

/// `db schema`: the DDL, for teams that keep their own migrations.
pub fn schema() -> Result<Exit, CliError> {
    render::text(&tables::script())?;
    Ok(Exit::Ok)
}

/// `db check`: exit 1 where something is wrong.
pub fn check(path: &Path, json: bool) -> Result<Exit, CliError> {
    let findings = upkeep::check(path)?;
    let mut listing = Listing::new(&["check", "level", "detail"]);
    for finding in &findings {
        let level = match finding.level {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        };
        listing.row(vec![finding.check.into(), level.into(), finding.detail.clone().into()]);
    }
    render::list(&listing, json)?;
    Ok(if findings.iter().any(|f| f.level == Level::Fail) { Exit::Failure } else { Exit::Ok })
}

/// `db backup FILE`.
pub fn backup(path: &Path, file: &Path) -> Result<Exit, CliError> {
    let copied = upkeep::backup(path, file)?;
    render::text(&format!(
        "{}: {} with {} events, whole and checked\n",
        copied.file.display(),
        render::bytes(copied.bytes),
        copied.events
    ))?;
    Ok(Exit::Ok)
}

/// How long each kind of row is kept; zero: for ever.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    pub published: Duration,
    pub processed: Duration,
    pub inbox: Duration,
    pub audit: Duration,
}

/// `db prune`: what the daemon's retention does, now. It pauses at least as long as it holds the lock.
pub fn prune(path: &Path, keep: &Keep, now: Millis, actor: &str, json: bool) -> Result<Exit, CliError> {
    let classes = [
        (Class::Published, keep.published),
        (Class::Processed, keep.processed),
        (Class::Inbox, keep.inbox),
        (Class::Audit, keep.audit),
    ];
    let before: Vec<(Class, Millis)> = classes
        .into_iter()
        .filter(|(_, kept)| !kept.is_zero())
        .map(|(class, kept)| (class, now.saturating_sub(i64::try_from(kept.as_millis()).unwrap_or(i64::MAX))))
        .collect();
    let removed = upkeep::prune(path, &before, actor, std::thread::sleep)?;
    let mut listing = Listing::new(&["table", "removed"]);
    for (table, count) in removed {
        listing.row(vec![table.into(), count.into()]);
    }
    render::list(&listing, json)?;
    Ok(Exit::Ok)
}

/// `db uninstall [--yes] [--force]`: lists, and with `--yes` removes, what outboxd made in the file.
pub fn uninstall(path: &Path, yes: bool, force: bool, json: bool) -> Result<Exit, CliError> {
    let plan = upkeep::uninstall(path, yes, force)?;
    if json {
        let value =
            serde_json::to_value(&plan).map_err(|e| CliError::internal(format!("cannot render the list: {e}")))?;
        render::json(&value)?;
        return Ok(Exit::Ok);
    }
    let verb = if plan.done { "removed" } else { "would remove" };
    let mut lines: Vec<String> = plan.removes.iter().map(|(kind, name)| format!("{verb}: {kind} {name}")).collect();
    lines.extend(plan.keeps.iter().map(|k| format!("stays: {k}")));
    if !plan.done {
        lines.extend(plan.blockers.iter().map(|b| format!("in the way: {b}")));
        if plan.unpublished > 0 {
            lines.push(format!(
                "in the way: {} events are not published yet (--force overrules this)",
                plan.unpublished
            ));
        }
        lines.push("nothing was changed; a backup first (`outboxd db backup FILE`), then the same with --yes".into());
    }
    render::text(&(lines.join("\n") + "\n"))?;
    Ok(Exit::Ok)
}
