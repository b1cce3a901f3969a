//! Reading ahead and leasing: from the outbox into the lanes.

use super::{PublisherMsg, PublisherState, ReadAnswer, ReadSet, STORE_PAUSE, seqs};
use crate::actors::writer::Kind;
use crate::domain::event::{Millis, PendingEvent};
use crate::domain::ordering::{Admission, Row};
use crate::limits;
use crate::ports::Topology;
use crate::store::error::Result;
use crate::store::lease::{self, Fenced, Grant, LeaseRequest};
use crate::store::outbox::{self, Numbered, Share};

impl PublisherState {
    /// Reads rows while there is room for them: what was asked for by number first, then ahead of the cursor.
    pub(super) fn read(&mut self, now: Millis, _topology: &Topology) {
        let rules = &self.args.rules;
        let idle = self.reading || self.leasing || self.args.paused || self.draining.is_some();
        if idle || self.is_full() || self.settle_again.is_some() || now < self.read_after {
            return;
        }
        // while nothing is acked only what a probe needs
        let most = if self.stalled.is_some() { 1 } else { rules.batch };
        self.lanes.read_begins();
        let stale = self.lanes.take_stale(most);
        let asked = self.lanes.ask(most, now);
        // a stall with nothing left to probe with reads one row for it
        let probe_less = self.lanes.ready_rows() == 0 && self.lanes.in_flight() == 0 && asked.is_empty();
        let ahead = self.more && asked.len() < most && !self.lanes.is_full() && (self.stalled.is_none() || probe_less);
        if stale.is_empty() && asked.is_empty() && !ahead {
            return;
        }
        self.reading = true;
        self.more &= !ahead;
        let share = Share {
            publisher: self.args.index,
            publishers: self.args.publishers,
            rows: (most - asked.len().min(most - 1)).max(1),
            bytes: rules.batch_bytes,
        };
        let (store, to, after) = (self.args.store.clone(), self.myself.clone(), self.lanes.cursor());
        let rewinds = self.lanes.rewinds();
        tokio::spawn(async move {
            let (keys, numbers) = (stale.clone(), asked.iter().map(|a| a.seq).collect::<Vec<_>>());
            let result = store
                .read(move |conn| {
                    let again = outbox::read_again(conn, &keys, limits::LANE_MEMORY)?;
                    let rows = outbox::read_rows(conn, &numbers, share.bytes)?;
                    let ahead = if ahead { Some(outbox::read_ahead(conn, share, after)?) } else { None };
                    Ok(ReadSet { again, rows, ahead })
                })
                .await;
            let _ = to.cast(PublisherMsg::Read(Box::new(ReadAnswer { asked, stale, rewinds, result })));
        });
    }

    pub(super) fn on_read(&mut self, answer: ReadAnswer) {
        self.reading = false;
        let now = self.now();
        let ReadSet { again, rows, ahead } = match answer.result {
            Ok(found) => found,
            Err(error) => {
                self.report_store("cannot read the outbox; trying again", &error);
                answer.stale.iter().for_each(|key| self.lanes.touch(key));
                answer.asked.iter().for_each(|asked| self.lanes.not_answered(asked, now));
                self.more = true;
                self.read_after = now + STORE_PAUSE;
                return;
            }
        };
        for one in again {
            self.lanes.reread(&one.key, one.held, &one.seqs, one.more);
        }
        let mut taken = Vec::new();
        for (asked, row) in answer.asked.iter().zip(rows) {
            match row {
                Numbered::Later => self.lanes.not_answered(asked, now),
                Numbered::Gone => {
                    self.lanes.answer(asked, None, now);
                }
                Numbered::Pending(found) => {
                    if self.lanes.answer(asked, Some((&found.event, found.held)), now) == Admission::Take {
                        taken.push(found.event);
                    }
                }
            }
        }
        if let Some(ahead) = ahead {
            self.more |= ahead.more;
            if answer.rewinds == self.lanes.rewinds() {
                self.lanes.read_up_to(ahead.cursor);
            } else {
                // everything is to be read again: this answer says nothing about the position
                self.more = true;
            }
            for found in ahead.rows {
                if self.lanes.admit(&found.event, found.held, now) == Admission::Take {
                    taken.push(found.event);
                }
            }
        }
        if !taken.is_empty() {
            self.lease(taken, now);
        }
    }

    fn lease(&mut self, mut taken: Vec<PendingEvent>, now: Millis) {
        taken.sort_unstable_by_key(|event| event.seq);
        self.leasing = true;
        let stream_created = self.stream_created.clone();
        let request = LeaseRequest {
            epoch: self.args.epoch,
            publisher: self.args.index,
            seqs: seqs(&taken),
            now,
            expires_at: now.saturating_add(self.lease_millis()),
            floor: self.last_stream_seq,
            stream_created,
        };
        let (writer, to) = (self.args.writer.clone(), self.myself.clone());
        tokio::spawn(async move {
            let result = writer.write(Kind::Lease, move |tx| lease::lease(tx, &request)).await;
            let _ = to.cast(PublisherMsg::Leased(taken, result));
        });
    }

    pub(super) fn on_leased(&mut self, events: Vec<PendingEvent>, result: Result<Fenced<Grant>>) {
        self.leasing = false;
        let grant = match result {
            Ok(Fenced::Applied(grant)) => grant,
            Ok(Fenced::Lost) => return self.lose(),
            Err(error) => {
                self.report_store("cannot lease a batch; trying again", &error);
                events.iter().for_each(|event| self.lanes.lease_failed(event));
                self.read_after = self.now() + STORE_PAUSE;
                return;
            }
        };
        let now = self.now();
        if !grant.seqs.is_empty() {
            let lease = super::Lease {
                outstanding: grant.seqs.len(),
                // counted from before the write: never later than what the database says
                expires_at: now.saturating_add(self.lease_millis()),
                floor: self.last_stream_seq,
                stream_created: self.stream_created.clone(),
            };
            self.leases.insert(grant.token, lease);
        }
        let mut granted = grant.seqs.into_iter().peekable();
        let mut back = Vec::new();
        for event in events {
            if granted.next_if_eq(&event.seq).is_some() {
                let look = event.suspect.is_some();
                back.extend(self.lanes.leased(Row { event, token: grant.token, unknown_since: None, look }));
            } else {
                self.lanes.not_leased(&event);
            }
        }
        self.give_back(back);
    }

    /// Extends leases of which half is over.
    pub(super) fn renew(&mut self, now: Millis) {
        let half = self.lease_millis() / 2;
        if self.renewing || self.leases.values().all(|lease| lease.expires_at - half > now) {
            return;
        }
        self.renewing = true;
        self.expired |= self.leases.values().any(|lease| lease.expires_at <= now);
        let tokens: Vec<_> = self.leases.keys().copied().collect();
        let (epoch, expires_at) = (self.args.epoch, now.saturating_add(self.lease_millis()));
        let (writer, to) = (self.args.writer.clone(), self.myself.clone());
        for lease in self.leases.values_mut() {
            lease.expires_at = expires_at;
        }
        tokio::spawn(async move {
            let result = writer.write(Kind::Lease, move |tx| lease::renew(tx, epoch, &tokens, expires_at)).await;
            let _ = to.cast(PublisherMsg::Renewed(result));
        });
    }

    pub(super) fn on_renewed(&mut self, result: Result<Fenced<()>>) {
        self.renewing = false;
        match result {
            Ok(Fenced::Applied(())) => self.expired = false,
            Ok(Fenced::Lost) => self.lose(),
            Err(error) => {
                self.report_store("cannot renew leases; trying again", &error);
                self.read_after = self.now() + STORE_PAUSE;
                let soon = self.now() + self.lease_millis() / 4;
                self.leases.values_mut().for_each(|lease| lease.expires_at = lease.expires_at.min(soon));
            }
        }
    }
}
