-- Tenants' budgets: one call takes the claims of one gateway for any number of tenants, and answers each.
--
-- KEYS  1        :events         pubsub
--       1 + i    :budget:{name}  hash    requests, tokens: what is left (may be negative: a debt); at: ms of that
-- ARGV  one JSON array with, for each budget: tenant, requests and tokens a minute (0: not limited), need, more, back, owed
--       (policies.limits.Claim), and share: the part of what is left that `more` may take
-- Returns for each budget {granted, requests left, tokens left}; the last two as text, for they are no whole numbers.
--
-- Time is the store's. A budget that is full again is forgotten.

local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local MINUTE_MS = 60000

local function refilled(balance, limit, elapsed_ms)
  return math.min(limit, (balance or limit) + elapsed_ms * limit / MINUTE_MS)
end

local function until_full_ms(balance, limit)
  if limit == 0 then return 0 end
  return math.ceil((limit - balance) * MINUTE_MS / limit)
end

-- What is not limited is not kept: it would be taken for a balance when a limit is set one day.
local function keep(key, field, limit, balance)
  if limit == 0 then redis.call('HDEL', key, field) else redis.call('HSET', key, field, string.format('%.6f', balance)) end
end

local function settle(key, claim)
  local held = redis.call('HMGET', key, 'requests', 'tokens', 'at')
  local elapsed_ms = math.max(0, now_ms - (tonumber(held[3]) or now_ms))
  local requests = refilled(tonumber(held[1]), claim.requests, elapsed_ms)
  local tokens = refilled(tonumber(held[2]), claim.tokens, elapsed_ms)
  if claim.requests > 0 then requests = math.min(claim.requests, requests + claim.back) end
  if claim.tokens > 0 then
    local solvent = tokens > 0
    tokens = tokens - claim.owed
    -- The other gateways believe what they were told a moment ago; a debt must not wait until they ask again.
    if solvent and tokens <= 0 then redis.call('PUBLISH', KEYS[1], cjson.encode({ debtor = claim.tenant })) end
  end
  local granted = 0
  if claim.requests > 0 and (claim.tokens == 0 or tokens > 0) then
    local whole = math.max(0, math.floor(requests))
    granted = math.min(claim.need, whole)
    granted = granted + math.min(claim.more, math.floor((whole - granted) / claim.share))
    requests = requests - granted
  end
  keep(key, 'requests', claim.requests, requests)
  keep(key, 'tokens', claim.tokens, tokens)
  redis.call('HSET', key, 'at', now_ms)
  local full_ms = math.max(until_full_ms(requests, claim.requests), until_full_ms(tokens, claim.tokens))
  redis.call('PEXPIRE', key, full_ms + MINUTE_MS)
  return { granted, string.format('%.6f', requests), string.format('%.6f', tokens) }
end

local answers = {}
for i, claim in ipairs(cjson.decode(ARGV[1])) do answers[i] = settle(KEYS[1 + i], claim) end
return answers
