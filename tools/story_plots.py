"""The plots of the stories.

`stories.py` explains the notation. A blank line starts a new paragraph; single line breaks have no
meaning. Names are repeated often, so that no pronoun is ambiguous.
"""

PLOTS: dict[str, str] = {
    "lost": """
        <opening> [Most of all|More than anything], {hero} loved {his} {thing.look} {thing}. [It had
        been a present from {his} {family}.|Every [morning|evening], {he} {thing.use}.|{His}
        {family} had given it to {him}, and every day {he} {thing.use}.]

        <one_day> {hero} looked [on the shelf|in {his} bag|into the drawer], but the {thing} was
        gone! "<oh_no>! Where is my {thing}?" <cried> {hero}. {He} looked under <under>, but the
        {thing} was not there. {He} looked behind <behind>, but [it was not there, either|all {he}
        found was <junk>]. <sad>

        <met> <ask_wrong> "I have lost my {thing}," <said> {hero}. "<comfort>," said {friend}.
        "<together>."

        <lost_found>

        <glad> "<thanks>, {friend}!" [said|cried] {hero}. [{He} took the {thing} and {thing.use},
        and {friend} [looked on|watched] with [bright|shining] eyes.|From then on, {hero} took
        better care of the {thing}.] [<eat>|] <closing>""",
    "newcomer": """
        <opening> [But {hero} had nobody to play with.|{hero} was often alone and longed for a
        friend.] "I wish I had a friend," {he} [told {his} {family}|said to the moon|whispered every
        night].

        <one_day> {hero} saw {friend.full} sitting all alone at {place.spot}. {friend} was looking
        at the ground. [{hero} was a little afraid, but {he} took a deep breath.|{hero} walked
        closer on tiptoe.] "[Hello|Good morning|Hello there]! My name is {hero}," {he} said. "What
        is your name?" "My name is {friend}," came the quiet answer. "<shy_reason>."

        "Do you want to [play <game>|see {place.far}|share my {sweet}] with me?" asked {hero}.
        [{friend} looked up and smiled.|At first, {friend} did not answer. Then {friend.he}
        nodded.|{friend} jumped up at once.] [They played <game> until noon and then ran to
        {place.far}.|Together they ran to {place.far} and played <game> there.] {friend} [told such
        funny jokes that {hero} fell over laughing|knew a song about a [whale|donkey|button] and
        taught it to {hero}|could walk on {friend.his} hands].

        [But then {friend} slipped and scraped an elbow. "<oh_no>!" <cried> {hero}. {He} washed the
        scrape with cool water and [put a leaf on it|blew on it]. "[That is better|It hardly hurts
        now]," said {friend}. "<thanks>."||When the sun went down, {friend} grew quiet again. "Will
        you come back tomorrow?" {friend.he} asked. "Of course I will," <said> {hero}. "I promise."]

        [In the evening|At supper time], {hero} ran home to {his} {family}. "I have a friend now!"
        {he} <cried>. [The next morning, {friend} was already waiting at {place.spot}.|The next day,
        {hero} and {friend} met at {place.spot} again, and the day after that, too.] [<glad>|]
        <closing>""",
    "storm": """
        <opening> <best_friend>

        One [day|morning|afternoon], {hero} and {friend} were [playing <game>|taking a walk] near
        {place.far}. {storm.sign}. "[Look at the sky|The weather is changing|I do not like the look
        of this]," said {friend}. "[We must|We should|Let us] go home." But it was too late.
        {storm.comes}.

        "[Quick|Hurry], this way!" <cried> {hero}. [They ran|They hurried, hand in hand,] to
        {place.hidden}. [It was dry inside, but very dark.|Inside, it was quiet and smelled of
        earth.|There was just enough room for two.] {friend} [shivered|trembled]. "I am
        [scared|frightened]," {friend.he} whispered. [{hero} took {friend} by the hand|{hero} put an
        arm around {friend}] [and told a story about a brave [snail|teapot|knight]|and sang a song
        about the sun|and counted slowly to a hundred]. [Little by little|Slowly], {friend} stopped
        [shaking|trembling].

        [Then they heard somebody calling. It was {elder} the {elder.job}, with a lantern. "There
        you are!" said {elder}. "I have been looking for you everywhere." {elder} stayed with them
        until the worst was over.|]

        At last the {storm} [was over|passed]. {storm.after}. {hero} and {friend}
        [walked|skipped|ran] home, where {hero}'s {family} was waiting at the door. "[You are
        safe|Thank goodness]!" <cried> {his} {family}, and gave them both [a big hug|dry socks and
        {sweet}|a warm bath and {sweet}]. "I was not afraid with {hero} beside me," said {friend}.
        <proud> <closing>""",
    "build": """
        <opening> <best_friend>

        <one_day> {hero} had an idea. "Let us build a {project}!" {he} said. "[What a good idea|That
        will be fun|I would love that]," <said> {friend}. "But what can we build it from?" [They
        looked around in the shed|They searched all morning|They asked {his} {family}] and found
        {project.from}. [They measured and hammered|They worked and whistled|They tied and glued]
        all day long near {place.spot}.

        [In the evening|When the sun was low|At last], the {project} was ready. But it was not yet
        strong. {project.fails}! "<oh_no>!" <cried> {friend}. "[Now it is ruined|All that work for
        nothing]." <sad> [But {hero} did not give up.|Then {he} wiped {his} nose and thought.] "[We
        need|What we need is] {project.mends}," {he} said.

        [So they went to {elder} the {elder.job}. "Please, do you have {project.mends} for us?"
        asked {hero}. {elder} [rubbed {elder.his} chin|looked in every drawer]. "[Yes, I do|I think
        so]," said {elder}, "but first you must [sweep my floor|stack my firewood|help me carry
        these baskets]." They did it gladly, and {elder} gave them {project.mends}.|{friend} ran
        home and came back with {project.mends}. "I had been saving it," said {friend}, "but it is
        just right for our {project}."]

        The next day, {hero} and {friend} mended the {project} with {project.mends}. This time, the
        {project} [held|was strong enough|did not break]. <glad> They {project.use}. "[It works|We
        did it|Hurrah]!" [shouted|cheered] {friend}. [<eat>|] [Soon everyone [came to see|admired]
        the {project}.|"Tomorrow we will paint it [blue|red|green]," said {hero}.] <closing>""",
    "contest": """
        <opening> Every year, there was a {contest}, and {hero} [dreamed of winning it|wanted to win
        it more than anything|had never won it].

        [For <weeks>|Day after day], {hero} {contest.doing}. {His} {family} [watched from the
        window|cheered for {him}|nodded]. "[You get better every day|You are doing well|I can see
        that you mean it]," said {his} {family}. [But {friend.full} only laughed. "I will win, just
        as I did last year," said {friend}.|{friend.Full} practiced just as hard. "May the best one
        win," said {friend}.]

        At last, the day of the {contest} came. [Flags fluttered|A band played|Everybody wore a
        paper hat], and {elder} the {elder.job} [rang a bell|blew a horn|waved a white cloth].
        {contest.go}. {hero} was [doing better than anyone|among the best|full of hope]. But then
        {friend} {contest.slip}. "<oh_no>!" <cried> {friend}. "[Now I have lost|It is all over]."

        {hero} [looked back|stopped]. If {he} helped now, {he} would hardly win. "[Winning is not
        everything|A prize is only a prize|It is no fun to win like that]," {he} thought. So {hero}
        went to {friend} and {contest.mend}. ["Why are you helping me?" asked {friend}. "Because
        [you need help|I would be glad of help, too|we are neighbors]," <said> {hero}.|"But what
        about the prize?" asked {friend}. "[A friend is worth more than a prize|Somebody else may
        have it]," <said> {hero}.]

        [{other.Full} won the {contest} that year. But {elder} had seen everything. "There is a
        second prize today," said {elder}, "for the kindest heart," and gave {hero} <gift>.|{hero}
        and {friend} were the very last to finish, side by side. But the crowd clapped louder for
        them than for anyone else. {elder} gave each of them <gift>.|Then they both went on as well
        as they could. And in the end, by the breadth of a hair, {hero} won after all! {friend} was
        the first to clap.] [<proud>|<glad>] [<eat>|] <closing>""",
    "map": """
        <opening> <best_friend>

        <one_day> {hero} found [an old bottle|a dusty book|a tin box] [in the attic|at
        {place.spot}|under a loose board]. Inside was a [yellow|crumpled|faded] piece of paper. {He}
        unfolded it with [shaking|careful] hands. "[Look, {friend}|{friend}, come quick]!" {he}
        <cried>. "It is a treasure map!" "[There is a red cross on it|It shows a red cross]," said
        {friend}, "right at {place.hidden}."

        They packed [a rope and some {sweet}|a lantern and some {sweet}|a shovel and some {sweet}]
        and set off. [First|To begin with], they [walked|marched|went] past {place.far}.
        [2*<obstacle>|] [|Once, {friend} wanted to turn back. "[Just a little farther|We are nearly
        there]," said {hero}.|"Twenty steps to the [left|right]," read {hero}, and they counted
        every step.]

        At last they reached {place.hidden}. [They dug and dug|They felt along the wall|They turned
        over every stone] until {hero} touched something [hard|cold|smooth]. "[I have found it|Here
        it is|This must be it]!" {he} <cried>. It was {treasure}! [{friend} danced in a
        circle.|{friend}'s eyes grew as round as plates.]

        ["Who hid it here?" {friend} wondered. {elder} the {elder.job} knew the answer. "I hid it
        myself, long ago," said {elder} with a wink. "[I hoped that somebody would find it|Now it
        belongs to you]."|"[Half of it is yours|We found it together, so we will share it|It belongs
        to both of us]," said {hero}.] And so they {treasure.then}. [<glad>|] <closing>""",
    "ill": """
        <opening> [Next door|At the end of the lane|Near {place.spot}] lived {elder}, the old
        {elder.job}. {elder} [always had a kind word for {hero}|told the best stories|often gave
        {hero} a slice of bread and butter].

        But one [day|morning|cold day|gray morning], {elder}'s door stayed shut. {hero} knocked and
        went in. {elder} lay in bed [with a red nose|and coughed|and looked very pale]. "I am ill,
        {hero}," said {elder} in a [thin|weak|hoarse] voice. "And there is nothing left to eat in
        the house." {hero} [felt sorry for {elder}|thought hard]. "I will make you {remedy}," {he}
        said. "[That will do you good|You will soon feel better]."

        [For {remedy}|To make {remedy}], {he} needed {remedy.gather}. {hero} took a basket and went
        to {place.far}. [There {he} met {friend.full}.|{friend.Full} was already there.] "[What are
        you looking for|Where are you going in such a hurry], {hero}?" asked {friend}. "I need
        {remedy.gather} for {elder}," <said> {hero}. "{elder} is ill." "[Then I will come with
        you|<together>]," said {friend}. [<obstacle>|] Before long, the basket was full.

        Back in {elder}'s kitchen, {hero} {remedy.make}. {friend} [lit the stove|set the
        table|washed the pots|swept the floor]. [Soon, a wonderful smell filled the house.|Soon the
        whole house smelled of {remedy.bare}.] {elder} sat up and [tasted|tried] the {remedy.bare}.
        "Oh, how good that is," said {elder}. [And {elder.he} did not leave a single drop.|A bit of
        color came back into {elder.his} cheeks.]

        {hero} and {friend} came back every day. After <weeks>, {elder} was [well|healthy|strong]
        again. "<thanks>," {elder.he} said to them, and gave them <gift>. [<glad>|] <closing>""",
    "promise": """
        <opening> <best_friend>

        <one_day> {friend} had to [visit an aunt|go to town|travel over the hills]. "Will you
        {promise} for me while I am away?" asked {friend}. "[Of course|Certainly], I promise,"
        <said> {hero}. "[You can count on me|Do not worry about a thing]." And {friend} set off,
        [quite|perfectly] content.

        [At first, {hero} thought of the promise.|{hero} really meant to do it.] But then [a {bird}
        with a [funny|long] tail hopped by, and {he} followed it|a fiddler played at {place.spot},
        and {he} stayed to listen|{he} found a patch of sweet berries and ate them one by one|{he}
        lay down in the warm sun and fell asleep]. The hours went by, and {hero} forgot to
        {promise}.

        When {hero} remembered, it was too late: {promise.harm}. {His} face grew hot. [Soon,
        {friend} came home|In the evening, {friend} came back] and saw it. "[But you promised|You
        gave me your word], {hero}," said {friend} [quietly|in a small voice], and turned away.
        <sad>

        ["What should I do?" {he} asked {his} {family}. "Tell the truth, and then put it right,"
        said {his} {family}.|All night, {hero} could not sleep. "I must put it right," {he}
        thought.] The next morning, {hero} went to {friend}. "I am [very|so|truly] sorry," {he}
        said. "I promised to {promise}, and I forgot. [It was my fault|I was careless]." Then {he}
        got to work. {hero} {promise.mend}, and [it took all day|{he} did not stop until sunset].

        {friend} [watched for a while|came closer] and began to smile. "[I forgive you|I am not
        angry any more|Let us be friends again], {hero}," said {friend}. <glad> [<eat>|] From then
        on, whenever {hero} made a promise, {he} kept it. [<closing>|]""",
    "skill": """
        <opening> There was one thing {hero} could not do: {he} could not {skill}. [All the others
        could.|Everyone else seemed to know how.]

        <one_day> {he} tried to {skill}, but {hero} {skill.fails}. {other.Full} saw it and
        [giggled|laughed out loud]. "[You will never learn to {skill}|Even my [hat|shoe] could do
        that better]," said {other}. {hero} [went red|swallowed hard]. {He} tried again, but [once
        more {he}|again {he}] {skill.fails}. <sad>

        {elder} the {elder.job} had been watching. "When I was young, I could not {skill}, either,"
        said {elder}. "Shall I tell you a secret?" "Yes, please," <said> {hero}. "{skill.advice},"
        said {elder}. "[And never give up|And try again tomorrow|The rest is practice]."

        [So {hero} practiced every day.|For <weeks>, {hero} practiced until it was dark.|Every
        evening, {hero} practiced behind the house.] [Sometimes {he} wanted to stop, but then {he}
        remembered the words of {elder}.|"{skill.advice}," {he} said to {himself} again and again.]
        And then, one [day|morning|evening], it happened: {hero} {skill.works}! <proud>

        {other} [stared|stood there with an open mouth]. "[I was wrong|I am sorry I laughed],
        {hero}," said {other}. "Can you teach me to {skill}, too?" [{hero} could have said no, but
        {he} smiled.|{hero} thought about it for a moment.] "[Of course|Gladly|With pleasure]," {he}
        said. "{skill.advice}." <skill_end>""",
    "dark": """
        <opening> By day, {hero} was not afraid of anything. But at night, when the lamp was out,
        {he} pulled the blanket over {his} [head|nose|ears].

        One {season} night, {friend.full} came to stay. They [told each other jokes|ate
        {sweet}|played <game>] until bedtime. Then the house grew quiet. "{noise.Name}," went
        something outside. "[Did you hear that|What was that]?" whispered {hero}. "{noise.Name}," it
        went again. "[It is a monster|It is a ghost|Maybe it is a dragon]," [breathed|whispered]
        {friend}.

        [They hid under the bed|They held hands|They did not dare to move] and listened.
        "{noise.Name}." {hero}'s heart [beat like a drum|jumped into {his} throat]. But then {he}
        [thought|said to {himself}], "[A real monster would be louder|I want to know what it
        is|Being brave means being scared and going anyway]." {He} [lit a candle|took the
        lantern|found a flashlight]. "[Come with me|Stay close to me], {friend}," said {hero}. "[We
        will look together|There are two of us]."

        Step by step, they [crept|tiptoed] [down the stairs|along the hall|to the back door]. {hero}
        opened the door, and the light fell on [something very small|two shining eyes]. There was no
        monster at all. It was only {noise.cause}! [{friend} began to giggle, and {hero} giggled,
        too.|They both laughed until their sides hurt.|"You gave us such a fright!" said {friend}
        with a laugh.]

        {hero} [gave the little {noise.small} some water|wished the little {noise.small} good
        night|told the little {noise.small} not to be afraid]. [In the morning, {he} told {his}
        {family} everything. "That was very brave," said {his} {family}. <proud>|Then they went back
        to bed and slept until the sun was high.] And when {hero} heard "{noise}" again, {he} [only
        smiled|turned over and went back to sleep|thought of the little {noise.small}].
        <closing>""",
    "garden": """
        <opening> [One spring morning|At the end of winter|One mild day], {hero}'s {family} gave
        {him} a {plant}. "[What will become of it|It is so small. What is it good for]?" asked
        {hero}. "Plant it, and wait and see," said {his} {family}.

        {hero} dug a hole [near {place.spot}|behind the house|in the best corner of the garden] and
        laid the {plant} in it. {He} watered it every [morning|evening]. But for <weeks>, nothing
        happened. {friend.Full} came by and looked at the bare earth. "[Perhaps it is asleep|Maybe
        it was only a pebble|Let us dig it up and look]," said {friend}. "[No, it only needs time|We
        have to be patient]," said {hero}. So they [sang to it|told it stories|built a little fence
        around it] and waited.

        One day, a tiny green leaf poked out of the ground! "[It is growing|It is alive]!" <cried>
        {hero}. [But a hungry {bird} saw it, too. {hero} and {friend} made a scarecrow out of an old
        coat, and the {bird} flew away.|But then no rain fell for <weeks>, and the leaf began to
        droop. {hero} and {friend} carried water from {place.far}, one bucket after another.]

        By the end of summer, the {plant} had become {plant.grows}. [Everybody came to marvel at
        it.|Even {elder} the {elder.job} came to see it. "I have never seen anything like it," said
        {elder}.] <proud> {hero} and {friend} invited all the neighbors, and they all had
        {plant.feast}. "[It was worth the wait|And I wanted to dig it up]!" said {friend}[, and
        everyone laughed|]. {hero} kept [one seed|a handful of seeds] for the next spring.
        <closing>""",
    "baby": """
        <opening>

        <one_day> {hero} was walking near {place.spot} when {he} heard a small sound. [Under a
        bush|Behind a stone|In the long grass] sat a little {baby}, all alone. It {baby.cry}
        [sadly|softly|in fear]. "[Where is your mother, little one|Have you lost your way]?" asked
        {hero}. The {baby} only {baby.cry} again. <met> "[Look what I found|Come and look],
        {friend}!" said {hero}. "It is a {baby}, and it has lost its mother." "[The poor thing|How
        small it is]," said {friend}. "We must take it home."

        They asked {elder} the {elder.job}. "I know of a {baby.mother} that lives at {baby.home},"
        said {elder}. "[Go past {place.far} and follow the tracks|It is not far from
        {place.far}|Look for her behind {place.far}]." So {hero} [wrapped the {baby} in a scarf|put
        the {baby} in a basket|led the {baby} gently], and they set out. [<obstacle>|] [|The {baby}
        {baby.cry}, and {hero} [stroked|patted] it. "[Soon you will be home|It will not be long
        now]," {he} said.|When the {baby} grew tired, {friend} carried it for a while.]

        At last they came to {baby.home}. Somebody answered the {baby}! A big {baby.mother} [came
        running|hurried toward them|lifted her head]. The {baby} {baby.cry} with joy and pressed
        itself against its mother. The {baby.mother} [bowed to them|looked at them for a long
        time|nudged {hero} softly], as if to say thank you.

        [{hero} was a little sad to say goodbye. "But this is where it belongs," said
        {friend}.|"Goodbye, little {baby}," said {hero}. "Grow big and strong."] [After that,
        whenever {hero} passed {baby.home}, the {baby} came to greet {him}.|And all the way home,
        {hero} and {friend} talked about the {baby}.] [<glad>|] <closing>""",
    "birthday": """
        <opening> It was the day before {hero}'s birthday, and {he} [could hardly sleep|had been
        counting the days].

        In the morning, {hero} jumped out of bed. But {his} {family} only said, "[Please sweep the
        yard|Please fetch some water|Please feed the hens], {hero}." There was [no song and no
        cake|not a single candle on the table]. "[Has everybody forgotten my birthday|Does nobody
        remember]?" thought {hero}. {He} went to see {friend.full}, {his} best friend. But {friend}
        was in a hurry. "I have no time today," said {friend}, and shut the door. {elder} the
        {elder.job} [was busy, too|only shook {elder.his} head]. <sad>

        All alone, {hero} walked to {place.far}. {He} [threw pebbles until noon|told {his} sorrow to
        a {bird}|drew a cake in the dust]. When it grew dark, {he} went home [with slow steps|with
        {his} head down]. But what was that? At {place.spot}, [a hundred lanterns were glowing|the
        trees were hung with paper stars|there was music in the air].

        "Surprise!" [shouted|cried] everybody. {friend} was there, and {elder}, too. {hero}'s
        {family} was carrying {sweet}. "[Did you really think we had forgotten|Did you believe it]?"
        asked {friend} [with a grin|and laughed]. "[We had to keep it a secret|It was hard not to
        tell you]." Then {friend} gave {hero} a present: a {thing.look} {thing}!

        "[This is the best day of my life|I will never forget this|What a surprise]," said {hero}.
        <glad> {He} took the {thing} and {thing.use}, and they [danced|sang|celebrated] until
        midnight. <closing>""",
    "stuck": """
        <opening>

        <one_day> {hero} was on {his} way to {place.spot} when {he} heard a voice. "Help! [Help!|Is
        anybody there?|Please, help me!]" It was {friend.full}, who was stuck {trap}! "How did you
        get in there?" asked {hero}. "I was looking for my {thing}," <said> {friend}, "and now I
        cannot get out." "[Hold tight|Give me your hands]," said {hero}. {He} pulled and pulled, but
        {friend} did not move.

        {elder} the {elder.job} came along the road. "[Wait, I will help|Let me try, too]," said
        {elder}. [{elder} held on to {hero}, and {hero} held on to {friend}.|{elder} took one arm,
        and {hero} took the other.] "One, two, three!" They pulled [until they were red in the
        face|with all their strength|as hard as they could]. But {friend} was still stuck.
        [<sad>|"Will I have to stay here forever?" asked {friend}.]

        Then {hero} had an idea. "What we need is {trap.tool}!" {he} <cried>, and ran home to fetch
        it. {hero} [took|used] {trap.tool} and {trap.how}. And then, with a loud pop, {friend} was
        free!

        "<thanks>, {hero}!" said {friend}. [And look, {friend} was holding the {thing.look} {thing}
        in one hand.|And there on the ground lay the {thing.look} {thing}, too.] [Everyone laughed
        with relief.|<glad>] [<eat>|] <closing>""",
    "quarrel": """
        <opening> <best_friend>

        <one_day> {hero} and {friend} found a {thing.look} {thing} at {place.spot}. "I saw it
        first!" cried {hero}. "No, I saw it first!" cried {friend}. They both pulled at the {thing}.
        "[Then I will not play with you any more|You always want everything]," said {friend}, and
        [ran away|stamped off]. Now {hero} had the {thing} all to {himself}.

        At home, {hero} took the {thing} and {thing.use}. But [it was no fun alone|it did not make
        {him} happy]. "Where is {friend} today?" asked {his} {family}. "We had a quarrel," <said>
        {hero}. {His} {family} [was quiet for a while|put down the dishes]. "[A {thing} is easy to
        find, but a friend is not|Things are nice, but friends are nicer]," said {his} {family}.

        [The next morning|That very evening|Before breakfast], {hero} ran to {friend}'s house with
        the {thing}. {friend} was sitting on the steps [with red eyes|and staring at the ground]. "I
        am sorry," said {hero}. "You can have the {thing}." "No, I am sorry," said {friend}. "You
        can have it." They looked at each other and [had to laugh|began to giggle].

        [So they shared the {thing}. One week it lived with {hero}, and the next week it lived with
        {friend}.|Then {elder} the {elder.job} came down the road. "Has anybody seen my {thing}?"
        asked {elder}. {hero} and {friend} gave it back at once, and {elder} gave them {sweet} as a
        reward.] They never quarreled about a {thing} again. [<glad>|] <closing>""",
    "moon": """
        <opening> Every night, {hero} looked up at the moon. "I would like to [touch|hold] the moon,
        just once," {he} told {his} {family}. "The moon is [far|very far] away," said {his}
        {family}. But {hero} [did not stop dreaming of it|had made up {his} mind].

        One {season} evening, {he} took [a ladder|the tallest ladder|a stool and a box] to
        {place.far}. {hero} climbed as high as {he} could and stretched out {his} arms. It was not
        high enough. {friend.Full} [looked up in surprise|came by with a basket]. "What are you
        doing up there, {hero}?" asked {friend}. "I want to touch the moon," <said> {hero}.

        "[Let me climb on your shoulders|Let us throw a rope around it|Let us call it, and perhaps
        it will come]," said {friend}. They tried it, but [they fell into the soft grass|the moon
        stayed where it was|nothing came of it]. <sad>

        {elder} the {elder.job} had heard them. [{elder.He} filled a bucket with water and set it on
        the ground.|{elder.He} put a bowl of water in front of them.] "Look into the water," said
        {elder}, "and [do not breathe|keep still]." And there was the moon, round and silver! {hero}
        put one finger into the water. The moon [trembled|danced] in a hundred little rings.

        "I have touched the moon!" <cried> {hero}. "[Now it is your turn|You try it, too],
        {friend}." {friend} [dipped in a hand|touched the water] and [gasped|laughed softly]. "[It
        is cold|It tickles]!" said {friend}. [<glad>|] [They stayed until the moon had gone behind
        the hills.|Then they drank a little of the moon water, for luck.] <closing>""",
}
